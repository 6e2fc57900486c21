"""A disk that fails on demand, and the suite that runs a tier on it."""

from __future__ import annotations

import enum
import errno
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtier.errors import MediumError
from kvtier.record.record import ALIGN, Buffer
from kvtier.system.disk import AnyPath, Disk
from kvtier.testing.subject import Rig, Subject, failures, make_keys
from kvtier.types import Outcome

SECTOR = 512


class Fault(enum.Enum):
    """What can go wrong at one call."""

    SHORT_READ = "short_read"
    SHORT_WRITE = "short_write"
    EIO = "eio"
    ENOSPC = "enospc"
    LATENCY = "latency"
    TORN_WRITE = "torn_write"
    FLIPPED_BIT = "flipped_bit"
    DEATH = "death"


ALL_CALLS = frozenset({"open", "readv", "writev", "allocate", "sync", "rename", "unlink"})
NEED_ROOM = frozenset({"writev", "allocate", "create"})
POSSIBLE: Mapping[Fault, frozenset[str]] = {
    Fault.SHORT_READ: frozenset({"readv"}),
    Fault.SHORT_WRITE: frozenset({"writev"}),
    Fault.EIO: ALL_CALLS | {"create"},
    Fault.ENOSPC: NEED_ROOM,
    Fault.LATENCY: ALL_CALLS | {"create"},
    Fault.TORN_WRITE: frozenset({"writev"}),
    Fault.FLIPPED_BIT: frozenset({"readv", "writev"}),
    Fault.DEATH: ALL_CALLS | {"create"},
}


class Call(NamedTuple):
    """One call through the seam: its name ("create" for an open that creates), and its number."""

    name: str
    number: int


Plan = Callable[[Call], Fault | None]
"""Decides what happens at a call; it is asked for one call at a time."""


def never(call: Call) -> Fault | None:
    """A healthy disk."""
    return None


def scripted(faults: Mapping[int, Fault]) -> Plan:
    """These faults at these calls; one that is impossible at its call does not happen."""
    return lambda call: faults.get(call.number)


def seeded(seed: int, rate: float, kinds: Sequence[Fault]) -> Plan:
    """Faults of these kinds at a share of the calls, the same ones for the same seed."""
    dice = random.Random(seed)

    def roll(call: Call) -> Fault | None:
        possible = [kind for kind in kinds if call.name in POSSIBLE[kind]]
        return dice.choice(possible) if possible and dice.random() < rate else None

    return roll


def die() -> None:
    """What kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyDisk(Disk):
    """The real disk, with the faults of `plan`; counts its calls and what went wrong."""

    def __init__(self, plan: Plan = never, *, seed: int = 0) -> None:
        self.plan = plan
        self.calls = 0
        self.happened: list[tuple[Call, Fault]] = []
        self.on_latency: Callable[[Call], None] = lambda call: None
        self._dice = random.Random(seed)
        self._lock = threading.Lock()

    def _next(self, name: str) -> Fault | None:
        """Number a call, and carry out the faults that need nothing of its arguments."""
        with self._lock:
            call = Call(name, self.calls)
            self.calls += 1
            fault = self.plan(call)
            if fault is None or name not in POSSIBLE[fault]:
                return None
            self.happened.append((call, fault))
        if fault is Fault.EIO:
            raise OSError(errno.EIO, f"injected at call {call.number}")
        if fault is Fault.ENOSPC and name != "writev":
            raise OSError(errno.ENOSPC, f"injected at call {call.number}")
        if fault is Fault.LATENCY:
            self.on_latency(call)
        if fault is Fault.DEATH and name != "writev":
            die()
        return fault

    def _below(self, limit: int) -> int:
        with self._lock:
            return self._dice.randrange(limit) if limit > 0 else 0

    def open(self, path: AnyPath, *, create: bool = False, direct: bool = False) -> int:
        self._next("create" if create else "open")
        return super().open(path, create=create, direct=direct)

    def open_to_read(self, path: AnyPath) -> int:
        self._next("open")
        return super().open_to_read(path)

    def readv(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        fault = self._next("readv")
        if fault is Fault.SHORT_READ:
            into = self._part(into, at_least=1)
        count = super().readv(fd, into, offset)
        if fault is Fault.FLIPPED_BIT and count:
            at = self._below(count)
            for buffer in into:
                if at < len(buffer):
                    buffer[at] ^= 1 << self._below(8)
                    break
                at -= len(buffer)
        return count

    def writev(self, fd: int, data: Sequence[Buffer], offset: int) -> int:
        fault = self._next("writev")
        if fault is Fault.FLIPPED_BIT:
            data = [_joined(data)]
            data[0][self._below(len(data[0]))] ^= 1 << self._below(8)
        elif fault is Fault.TORN_WRITE:
            data = [self._torn(fd, _joined(data), offset)]
        elif fault is Fault.SHORT_WRITE:
            data = self._part(data, at_least=1)
        elif fault in (Fault.ENOSPC, Fault.DEATH):
            data = self._part(data, at_least=0)
        count = super().writev(fd, data, offset) if data else 0
        if fault is Fault.DEATH:
            die()
        if fault is Fault.ENOSPC:
            raise OSError(errno.ENOSPC, "injected in a write")
        return count

    def allocate(self, fd: int, size: int) -> None:
        self._next("allocate")
        super().allocate(fd, size)

    def sync(self, fd: int) -> None:
        self._next("sync")
        super().sync(fd)

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        self._next("rename")
        super().rename(source, target)

    def unlink(self, path: AnyPath) -> None:
        self._next("unlink")
        super().unlink(path)

    def _part(self, buffers: Sequence[Buffer], *, at_least: int) -> list[Buffer]:
        """The beginning of some buffers, cut where direct I/O can cut."""
        whole = sum(len(buffer) for buffer in buffers)
        unit = 1 if whole % ALIGN else ALIGN
        left = (at_least + self._below(whole // unit - at_least)) * unit
        part = []
        for buffer in buffers:
            if left > 0:
                part.append(buffer[:left])
                left -= len(part[-1])
        return part

    def _torn(self, fd: int, data: Buffer, offset: int) -> Buffer:
        """What is on the disk now, with the first sectors of `data` over it."""
        torn = memoryview(mmap.mmap(-1, len(data)))
        super().readv(fd, [torn], offset)
        cut = self._below(-(-len(data) // SECTOR)) * SECTOR
        torn[:cut] = data[:cut]
        return torn


def _joined(buffers: Sequence[Buffer]) -> Buffer:
    """A copy of some buffers in one, in memory that direct I/O accepts."""
    joined = memoryview(mmap.mmap(-1, sum(len(buffer) for buffer in buffers)))
    at = 0
    for buffer in buffers:
        joined[at : at + len(buffer)] = buffer
        at += len(buffer)
    return joined


# A tier under the faults of `kvtier.testing.faults`: subclass `TierFaults` with your subject.
#
# Right bytes or a miss, at every moment; nothing raises; and full service when the faults end.

BLOCKS = 6
SURVIVABLE = tuple(fault for fault in Fault if fault is not Fault.DEATH)
SEEDS = range(5)


def remove(path: Path) -> None:
    """Somebody cleans up."""
    path.unlink()


def empty(path: Path) -> None:
    """A file system forgot the data of a file that was not synced."""
    os.truncate(path, 0)


def cut(path: Path) -> None:
    """... or the second half of it."""
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    """Something else entirely lies there."""
    path.write_bytes(b"\xa5" * path.stat().st_size)


DAMAGES = (remove, empty, cut, overwrite)


class TierFaults:
    """For tiers whose files are reached through a `Disk`."""

    subject: Subject

    def rig(self, folder: Path, disk: FaultyDisk) -> Rig:
        """A tier that was opened while all was well."""
        return Rig(self.subject, folder, blocks=BLOCKS, disk=disk)

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("fault", [*SURVIVABLE, None], ids=lambda f: f.value if f else "all")
    def test_right_bytes_or_a_miss(self, tmp_path: Path, fault: Fault | None, seed: int) -> None:
        disk = FaultyDisk(seed=seed)
        rig = self.rig(tmp_path, disk)
        disk.plan = seeded(seed, 0.25, [fault] if fault else SURVIVABLE)
        walk(rig, random.Random(seed), steps=60)
        assert disk.happened
        disk.plan = never
        self.check_full_service(rig)
        rig.close()

    @pytest.mark.parametrize("fault", SURVIVABLE, ids=lambda f: f.value)
    def test_a_medium_that_always_fails_is_a_tier_that_misses(
        self, tmp_path: Path, fault: Fault
    ) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        disk.plan = lambda call: fault
        walk(rig, random.Random(1), steps=30)
        disk.plan = never
        self.check_full_service(rig)
        rig.close()

    @pytest.mark.parametrize("fault", SURVIVABLE, ids=lambda f: f.value)
    def test_one_fault_at_every_call_of_a_life(self, tmp_path: Path, fault: Fault) -> None:
        """Store, load, evict, drop: with the fault at the first call, then at the second, ..."""
        calls = self.a_life(tmp_path / "healthy", never)
        for number in range(calls):
            self.a_life(tmp_path / str(number), scripted({number: fault}))

    def a_life(self, folder: Path, plan: Plan) -> int:
        folder.mkdir()
        disk = FaultyDisk(seed=1)
        rig = self.rig(folder, disk)
        disk.plan, disk.calls = plan, 0
        keys = make_keys(BLOCKS + 2)
        rig.put(keys[:BLOCKS])
        rig.get(keys[:BLOCKS])
        rig.put(keys[BLOCKS:])
        rig.tier.forget(keys[:1])
        rig.tier.tick()
        assert rig.get(keys) == rig.resident(keys)
        disk.plan, calls = never, disk.calls
        self.check_full_service(rig)
        rig.close()
        return calls

    @pytest.mark.parametrize("seed", SEEDS)
    def test_opening_fails_by_name_or_works(self, tmp_path: Path, seed: int) -> None:
        disk = FaultyDisk(seed=seed)
        rig = self.rig(tmp_path, disk)
        keys = rig.put(make_keys(BLOCKS))
        rig.close()
        faults = [fault for fault in SURVIVABLE if fault is not Fault.TORN_WRITE]
        for attempt in range(8):
            disk.plan = seeded(8 * seed + attempt, 0.3, faults)
            try:
                rig.open()
            except MediumError:
                continue
            rig.get(keys)
            rig.close()
        disk.plan = never
        rig.open()
        assert rig.get(keys) == rig.resident(keys)
        self.check_full_service(rig)
        rig.close()

    def test_a_full_disk_drops_stores_and_keeps_what_is_there(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        old = rig.put(make_keys(3))
        disk.plan = lambda call: Fault.ENOSPC
        new = make_keys(3, start=50)
        reservation = rig.reserve(new, evict=False)
        failed = rig.write(reservation)
        assert set(failed.values()) <= {Outcome.NO_SPACE}
        rig.tier.complete_store(reservation.keys, failed)
        assert rig.get(old) == old
        disk.plan = never
        assert rig.get(old) == old
        self.check_full_service(rig)
        rig.close()

    def test_short_transfers_are_no_failure(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        keys = make_keys(BLOCKS)
        disk.plan = lambda call: Fault.SHORT_WRITE
        assert rig.put(keys) == keys
        disk.plan = lambda call: Fault.SHORT_READ
        assert rig.get(keys) == keys
        rig.close()

    @pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
    def test_damage_done_by_others_is_a_miss(
        self, tmp_path: Path, damage: Callable[[Path], None]
    ) -> None:
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        keys = rig.put(make_keys(BLOCKS))
        for path in self.subject.block_files(tmp_path):
            with suppress(FileNotFoundError):  # damage that was found may be cleaned up meanwhile
                damage(path)
        assert rig.get(keys) == rig.resident(keys)
        for path in self.subject.block_files(tmp_path):
            with suppress(FileNotFoundError):  # damage that was found may be cleaned up meanwhile
                damage(path)
        rig.reopen()
        assert rig.get(keys) == rig.resident(keys)
        rig.close()

    def test_a_slow_transfer_sees_no_other_block(self, tmp_path: Path) -> None:
        """While one load hangs in the disk, the tier is as full and as busy as it can be."""
        disk = FaultyDisk()
        rig = self.rig(tmp_path, disk)
        keys = rig.put(make_keys(BLOCKS))
        spec = rig.tier.prepare_load(keys[:2])

        def meanwhile(call: Call) -> None:
            disk.plan = never
            rig.put(make_keys(BLOCKS, start=100))

        disk.on_latency = meanwhile
        disk.plan = lambda call: Fault.LATENCY
        assert rig.read(keys[:2], spec) == dict.fromkeys(keys[:2], Outcome.OK)
        rig.tier.complete_load(keys[:2])
        rig.close()

    def check_full_service(self, rig: Rig) -> None:
        """The tier stores and serves as much as ever, and so does the one after a restart."""
        rig.settle()
        new = make_keys(BLOCKS - self.subject.quarantine_blocks, start=1000)
        assert rig.put(new) == new
        assert rig.get(new) == new
        stats = rig.tier.stats()
        assert stats.in_flight == stats.pinned == 0
        rig.reopen()
        assert rig.resident(new) == (new if self.subject.persistent else [])
        assert rig.get(new) == rig.resident(new)


def walk(rig: Rig, dice: random.Random, *, steps: int) -> None:
    """Use a tier in every way; whatever it serves on the way is proved by `Rig.get`."""
    universe = make_keys(3 * BLOCKS)
    for _ in range(steps):
        some = dice.sample(universe, dice.randint(1, BLOCKS))
        step = dice.random()
        if step < 0.45:
            rig.put(some)
        elif step < 0.85:
            rig.get(universe)
        elif step < 0.9:
            rig.tier.forget(some)
        elif step < 0.95:
            reserved = rig.reserve(some).keys
            rig.tier.complete_store(reserved, failures(reserved, Outcome.TIMEOUT))
        else:
            rig.tier.touch(some)
        rig.tier.tick()
        rig.check_room()
