"""What every tier promises, sentence by sentence: subclass `TierContract` with your subject.

class TestMine(TierContract):
    subject = MySubject()
"""

from __future__ import annotations

from kvtier.testing.contract_parts.catalogue import CatalogueContract
from kvtier.testing.contract_parts.inspection import InspectionContract
from kvtier.testing.contract_parts.medium import MediumContract
from kvtier.testing.contract_parts.moves import TransferContract
from kvtier.testing.contract_parts.restarts import RestartContract


class TierContract(
    CatalogueContract, TransferContract, MediumContract, RestartContract, InspectionContract
):
    """All that a backend must do, and what its subject says that it does beyond."""
