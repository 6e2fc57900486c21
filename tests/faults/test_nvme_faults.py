"""The nvme tier on a disk that fails, with one slab and with many."""

import pytest
from support.tiers.subjects import NVME, SLABS

from kvtier.testing.faults import TierFaults


class TestNvmeFaults(TierFaults):
    subject = NVME


@pytest.mark.slow
class TestNvmeSlabsFaults(TierFaults):
    subject = SLABS
