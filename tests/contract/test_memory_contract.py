"""The reference model keeps the contract that it is the reference of."""

from support.tiers.subjects import MEMORY

from kvtier.testing.contract import TierContract


class TestMemory(TierContract):
    subject = MEMORY
