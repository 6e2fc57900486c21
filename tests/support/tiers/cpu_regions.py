"""Regions of CPU memory for tests, and processes that fill them and are stopped."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.backends.cpu import BACKEND, CpuSettings, CpuTier
from kvtier.backends.cpu.folder import CpuFolder
from kvtier.backends.cpu.medium import CpuHandler, Region
from kvtier.backends.cpu.memory import NewMemory
from kvtier.eviction import create_policy
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, Persistence
from kvtier.slab.folder import FolderLimits
from kvtier.slab.keeper import SlabKeeper
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, fill, prove
from kvtier.types import BlockKey, Presence
from support.tiers.nvme_rig import SLAB_BLOCKS, SMALL_FILES, child, expect

CONTEXT = TierContext(NAMESPACE, "test")


def settings(folder: Path, blocks: int = 8, keep: bool = True) -> CpuSettings:
    size = blocks * (12288 + 64) + 3 * 4096
    return CpuSettings(
        path=str(folder),
        capacity=Capacity(size=ByteSize(size)),
        eviction="lru",
        persistence=Persistence.KEEP if keep else Persistence.DISCARD,
    )


class Engine:
    """A tier with its handler. No keeper thread: a test says when the keeper works."""

    _count = itertools.count()

    def __init__(self, root: Path, *, blocks: int) -> None:
        self.root = root
        context = TierContext(NAMESPACE, f"engine-{next(self._count)}")
        slot, slabs = record_bytes(NAMESPACE.payload_bytes), -(-blocks // SLAB_BLOCKS)
        capacity = blocks * (slot + 64) + slabs * 4096 + SMALL_FILES
        memory = NewMemory(root, (), huge_pages=False, serving=False)
        folder = CpuFolder(root, context, Disk(), memory, capacity)
        limits = FolderLimits(
            capacity=capacity, free_floor=0, slot_bytes=slot, slab_bytes=SLAB_BLOCKS * slot
        )
        self.keeper = SlabKeeper(folder, limits)
        self.tier = CpuTier(self.keeper, folder, create_policy("lru"), keep_s=0.0)
        self.handler = CpuHandler(Region.attach(folder.region.path))

    def close(self) -> None:
        self.handler.close()
        self.tier.close()


@contextlib.contextmanager
def opened(folder: Path, context: TierContext = CONTEXT, blocks: int = 8) -> Iterator[CpuTier]:
    tier = BACKEND.open_tier(settings(folder, blocks), context)
    try:
        yield tier
    finally:
        tier.close()


def put(tier: CpuTier, keys: Sequence[BlockKey]) -> None:
    reservation = tier.prepare_store(keys)
    for key, slot in zip(reservation.keys, reservation.spec.slots, strict=True):  # type: ignore[attr-defined]
        fill(tier.region.record(slot), key)
    tier.complete_store(reservation.keys)


def served(tier: CpuTier, keys: Sequence[BlockKey]) -> list[BlockKey]:
    found = tier.lookup(keys)
    hits = [key for key, now in zip(keys, found, strict=True) if now is Presence.HIT]
    spec = tier.prepare_load(hits)
    for key, slot in zip(hits, spec.slots, strict=True):  # type: ignore[attr-defined]
        assert prove(tier.region.record(slot), key).ok
    tier.complete_load(hits)
    return hits


WRITER = """
from support.tiers.cpu_regions import BACKEND, CONTEXT, put, settings
tier = BACKEND.open_tier(settings(Path(sys.argv[1])), CONTEXT)
put(tier, make_keys(5))
tier.prepare_store(make_keys(2, start=50))
print('stored', flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextlib.contextmanager
def writer(folder: Path) -> Iterator[int]:
    with child(WRITER, folder) as process:
        expect(process, "stored")
        yield process.pid
