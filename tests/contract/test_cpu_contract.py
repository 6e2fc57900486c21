"""The cpu tier keeps the contract."""

from support.tiers.subjects import CPU

from kvtier.testing.contract import TierContract


class TestCpu(TierContract):
    subject = CPU
