"""A chain is a tier: it keeps the contract that every catalogue keeps, step by step too."""

from __future__ import annotations

import pytest
from hypothesis import settings
from support.tiers.chains import ScriptedMover
from support.tiers.subjects import MemorySubject

from kvtier.chain.context import ChainContext
from kvtier.chain.tier_chain import TierChain
from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.tier import Tier
from kvtier.settings import TierSettings
from kvtier.system.disk import Disk
from kvtier.testing.contract import CatalogueContract
from kvtier.testing.stateful import SETTINGS, tier_machine


class ChainSubject(MemorySubject):
    """Host memory with a chain around it."""

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> Tier:
        host = super().open_tier(settings, context, disk)
        return TierChain(ChainContext([host], [settings], ScriptedMover([]), context.namespace))


class TestChain(CatalogueContract):
    subject = ChainSubject()


class TestChainMachineBriefly(tier_machine(ChainSubject()).TestCase):  # type: ignore[misc]
    settings = settings(SETTINGS, max_examples=40)


@pytest.mark.slow
class TestChainMachine(tier_machine(ChainSubject()).TestCase):  # type: ignore[misc]
    """As many examples as for any tier."""
