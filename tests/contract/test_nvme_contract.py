"""The nvme tier keeps the contract."""

from subjects import NVME

from kvtier.testing.contract import TierContract


class TestNvme(TierContract):
    subject = NVME
