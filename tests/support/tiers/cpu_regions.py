"""Regions of CPU memory for tests, and processes that fill them and are stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.backends.cpu import BACKEND, CpuSettings, CpuTier
from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity, Persistence
from kvtier.testing.subject import NAMESPACE, fill, prove
from kvtier.types import BlockKey, Presence
from support.tiers.nvme_rig import child, expect

CONTEXT = TierContext(NAMESPACE, "test")


def settings(folder: Path, blocks: int = 8, keep: bool = True) -> CpuSettings:
    size = blocks * (12288 + 64) + 3 * 4096
    return CpuSettings(
        path=str(folder),
        capacity=Capacity(size=ByteSize(size)),
        eviction="lru",
        persistence=Persistence.KEEP if keep else Persistence.DISCARD,
    )


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
