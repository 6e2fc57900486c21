"""The tiers that kvtier brings, as the shipped suites see them."""

from __future__ import annotations

from pathlib import Path

from kvtier.backends.cpu import BACKEND as CPU_BACKEND
from kvtier.backends.cpu import CpuSettings
from kvtier.backends.nvme import BACKEND as NVME_BACKEND
from kvtier.backends.nvme import NvmeHandler, NvmeSettings, NvmeTier
from kvtier.eviction import create_policy
from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.tier import Tier
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, TierSettings
from kvtier.slab.folder import FolderLimits, SlabFolder
from kvtier.slab.keeper import SlabKeeper
from kvtier.slab.layout import ENTRY_BYTES, TABLE_AT
from kvtier.system.disk import Disk
from kvtier.testing.memory import BACKEND as MEMORY_BACKEND
from kvtier.testing.memory import MemorySettings
from kvtier.testing.subject import Subject, failures, make_keys
from kvtier.types import BlockKey, Outcome

SLAB_BLOCKS = 4


def capacity(size: int) -> Capacity:
    """So many bytes."""
    return Capacity(size=ByteSize(size))


class MemorySubject(Subject):
    """The reference model must keep its own contract."""

    backend = MEMORY_BACKEND

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> MemorySettings:
        return MemorySettings(capacity=capacity(blocks * record_bytes))


class CpuSubject(Subject):
    """Memory in a folder of the test's, so that nothing is left in /dev/shm."""

    backend = CPU_BACKEND
    persistent = True
    shared = True
    overhead_bytes = 1 << 20
    """Its engines' marks, and what eviction learns."""
    sheds = True
    off_disk = True
    quarantine_blocks = 1

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> CpuSettings:
        table = TABLE_AT + 4096 + blocks * ENTRY_BYTES
        return CpuSettings(path=str(folder), capacity=capacity(blocks * record_bytes + table))

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> Tier:
        assert isinstance(settings, CpuSettings)
        return CPU_BACKEND.open_tier(settings, context, disk)


class PlainCpuSubject(CpuSubject):
    """The same of a package that reaches its medium by means of its own, as a database would."""

    open_tier = Subject.open_tier


class NvmeSubject(Subject):
    """One slab, or several in a budget that has room for them."""

    backend = NVME_BACKEND
    persistent = True
    shared = True
    revives = True
    off_disk = True
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


class SlabsSubject(NvmeSubject):
    """The same with slabs of four blocks, so that engines have something to share."""

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> NvmeSettings:
        slabs = -(-blocks // SLAB_BLOCKS)
        size = blocks * (record_bytes + ENTRY_BYTES) + slabs * TABLE_AT + 2048
        return NvmeSettings(path=str(folder / "nvme"), capacity=capacity(size), eviction="lru")

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> NvmeTier:
        assert isinstance(settings, NvmeSettings)
        slot = record_bytes(context.namespace.payload_bytes)
        size = settings.capacity.resolve(0)
        folder = SlabFolder(Path(settings.path), context.namespace, disk)
        limits = FolderLimits(
            capacity=size, free_floor=0, slot_bytes=slot, slab_bytes=SLAB_BLOCKS * slot
        )
        keeper = SlabKeeper(folder, limits)
        tier = NvmeTier(keeper, create_policy(settings.eviction))
        keeper.start()
        _grow(tier)
        return tier


def _grow(tier: Tier) -> None:
    """Ask for room until there is no more: slabs are made when wanted, and the suites count."""
    held: list[BlockKey] = []
    while more := tier.prepare_store(make_keys(64, start=10**15), evict=False).keys:
        held += more
        tier.refresh()
    tier.complete_store(held, failures(held, Outcome.CANCELLED))
    tier.flush()
    tier.refresh()


MEMORY = MemorySubject()
CPU = CpuSubject()
PLAIN_CPU = PlainCpuSubject()
NVME = NvmeSubject()
SLABS = SlabsSubject()
