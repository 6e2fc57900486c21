"""The nvme tier on a disk that fails."""

from subjects import NVME

from kvtier.testing.fault_suite import TierFaults


class TestNvmeFaults(TierFaults):
    subject = NVME
