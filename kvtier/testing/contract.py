"""What every tier promises, sentence by sentence: subclass `TierContract` with your subject.

class TestMine(TierContract):
    subject = MySubject()
"""

from __future__ import annotations

from kvtier.testing.contract_catalogue import CatalogueContract
from kvtier.testing.contract_inspection import InspectionContract
from kvtier.testing.contract_medium import MediumContract
from kvtier.testing.contract_moves import TransferContract
from kvtier.testing.contract_restarts import RestartContract


class TierContract(
    CatalogueContract, TransferContract, MediumContract, RestartContract, InspectionContract
):
    """All that a backend must do, and what its subject says that it does beyond."""
