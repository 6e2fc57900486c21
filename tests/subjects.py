"""The tiers that kvtier brings, as the shipped suites see them."""

from __future__ import annotations

from pathlib import Path

from kvtier.backends.cpu import BACKEND as CPU_BACKEND
from kvtier.backends.cpu import CpuSettings, CpuTier
from kvtier.backends.memory import BACKEND as MEMORY_BACKEND
from kvtier.backends.memory import MemorySettings
from kvtier.backends.nvme import BACKEND as NVME_BACKEND
from kvtier.backends.nvme import NvmeHandler, NvmeSettings, NvmeTier
from kvtier.core.backend import TierContext
from kvtier.core.disk import Disk
from kvtier.core.settings import ByteSize, Capacity, TierSettings
from kvtier.core.slab.layout import ENTRY_BYTES, TABLE_AT
from kvtier.testing.subject import Subject


def capacity(size: int) -> Capacity:
    """So many bytes."""
    return Capacity(size=ByteSize(size))


class MemorySubject(Subject):
    """The reference model must keep its own contract."""

    backend = MEMORY_BACKEND

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> MemorySettings:
        return MemorySettings(capacity=capacity(blocks * record_bytes))


class CpuSubject(Subject):
    """A region in a folder of the test's, so that nothing is left in /dev/shm."""

    backend = CPU_BACKEND
    persistent = True
    quarantine_blocks = 1

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> CpuSettings:
        table = TABLE_AT + 4096 + blocks * ENTRY_BYTES
        return CpuSettings(path=str(folder), capacity=capacity(blocks * record_bytes + table))

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> CpuTier:
        assert isinstance(settings, CpuSettings)
        return CPU_BACKEND.open_tier(settings, context, disk)


class NvmeSubject(Subject):
    """One slab, or several in a budget that has room for them."""

    backend = NVME_BACKEND
    persistent = True
    shared = True
    revives = True
    quarantine_blocks = 1

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> NvmeSettings:
        small_files = 2048  # too little for another block
        size = blocks * (record_bytes + ENTRY_BYTES) + TABLE_AT + small_files
        return NvmeSettings(path=str(folder / "nvme"), capacity=capacity(size))

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> NvmeTier:
        assert isinstance(settings, NvmeSettings)
        return NVME_BACKEND.open_tier(settings, context, disk)

    def open_handler(self, settings: TierSettings, context: TierContext, disk: Disk) -> NvmeHandler:
        assert isinstance(settings, NvmeSettings)
        return NVME_BACKEND.open_handler(settings, context, disk)


MEMORY = MemorySubject()
CPU = CpuSubject()
NVME = NvmeSubject()
