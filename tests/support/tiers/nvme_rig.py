"""NVMe tiers with slabs so small that a test sees many of them, in this process and in others."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.backends.nvme import NvmeHandler, NvmeTier
from kvtier.backends.nvme.write_budget import leases_of
from kvtier.eviction import create_policy
from kvtier.record.record import record_bytes
from kvtier.slab.folder import FolderLimits, SlabFolder
from kvtier.slab.keeper import SlabKeeper
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, blank, prove, sealed
from kvtier.types import BlockKey, Namespace, Presence

SLAB_BLOCKS = 4
SMALL_FILES = 2048


def open_files() -> int:
    """How many files this process has open."""
    gc.collect()  # what tests before this one have left has files, too
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class LowDisk(Disk):
    """Reports as much free room as the test says."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int:
        return self.free


def within(capacity: int) -> FolderLimits:
    """So much for a folder, and no floor."""
    return FolderLimits(capacity=capacity, free_floor=0, slot_bytes=4096, slab_bytes=4096)


class Engine:
    """A tier with its handler. No keeper thread: a test says when the keeper works.

    What a test of `restart/nvme` leaves open is closed at its end."""

    opened: ClassVar[list[Engine]] = []

    def __init__(
        self,
        root: Path,
        *,
        blocks: int = 16,
        namespace: Namespace = NAMESPACE,
        disk: Disk | None = None,
        free_floor: int = 0,
        discard: bool = False,
        keep_s: float = 0.0,
        grows: bool = True,
        write_rate: float | None = None,
    ) -> None:
        slot = record_bytes(namespace.payload_bytes)
        slabs = -(-blocks // SLAB_BLOCKS)
        self.namespace = namespace
        self.root = root
        self.capacity = blocks * (slot + 64) + slabs * 4096 + SMALL_FILES
        limits = FolderLimits(
            capacity=self.capacity,
            free_floor=free_floor,
            slot_bytes=slot,
            slab_bytes=SLAB_BLOCKS * slot,
            discard=discard,
            keep_s=keep_s,
            grows=grows,
        )
        disk = disk or Disk()
        folder = SlabFolder(root, namespace, disk)
        leases = None if write_rate is None else leases_of(folder, write_rate, slot)
        self.keeper = SlabKeeper(folder, limits, leases)
        allowance = None if leases is None else leases.allowance
        self.tier = NvmeTier(self.keeper, create_policy("lru"), allowance=allowance)
        self.handler = NvmeHandler(
            root, namespace, threads=2, direct=True, power_safe=False, disk=disk
        )
        self.opened.append(self)

    @property
    def own_slabs(self) -> set[int]:
        return {place.slab.id for place in self.tier._places.by_slab.values() if place.mine}

    def put(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Store right records; the keys that were committed."""
        stored: list[BlockKey] = []
        for key in keys:
            self.keeper.work(thorough=True)
            reservation = self.tier.prepare_store([key])
            records = [sealed(each, self.namespace) for each in reservation.keys]
            outcomes = self.handler.store(reservation.spec, reservation.keys, records)
            failed = {k: o for k, o in zip(reservation.keys, outcomes, strict=True) if not o.ok}
            self.tier.complete_store(reservation.keys, failed)
            stored += [each for each in reservation.keys if each not in failed]
        return stored

    def hits(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The keys that this engine would serve now."""
        self.tier.refresh()
        found = self.tier.lookup(keys)
        return [key for key, now in zip(keys, found, strict=True) if now is Presence.HIT]

    def read(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Load hits; the keys whose right bytes arrived."""
        hits = self.hits(keys)
        records = [blank(self.namespace) for _ in hits]
        outcomes = self.handler.load(self.tier.prepare_load(hits), hits, records)
        failed = {}
        for key, record, outcome in zip(hits, records, outcomes, strict=True):
            proved = prove(record, key, self.namespace) if outcome.ok else outcome
            if not proved.ok:
                failed[key] = proved
        self.tier.complete_load(hits, failed)
        return [key for key in hits if key not in failed]

    def close(self) -> None:
        if self in self.opened:
            self.opened.remove(self)
        self.handler.close()
        self.tier.close()


@contextlib.contextmanager
def child(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a few lines in a process of its own, with these arguments; it ends with the block."""
    prelude = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from support.tiers.nvme_rig import Engine\n"
        "from kvtier.testing.subject import make_keys\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", prelude + program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def expect(process: subprocess.Popen[str], line: str) -> None:
    """Wait until the child has said so."""
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line
