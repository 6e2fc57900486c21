"""A disk that fails as disks do, on script or by seeded dice.

The fault model, which the suites hold every tier to. At any call through
`kvtier.core.system.disk.Disk`:

- SHORT_READ    a read returns only a part of what was asked for; that part is right.
- SHORT_WRITE   a write puts down only a part, and says so.
- EIO           the call fails with EIO and does nothing.
- ENOSPC        a call that needs room (write, allocate, create) fails for the lack of it; a write
                may have put down a part.
- LATENCY       the call is made after `on_latency` returns, which a test may use to let anything
                else happen first; nothing sleeps.
- TORN_WRITE    a write says that all is down, but only the first sectors are: the rest of the range
                keeps what was there. This is what a loss of power leaves behind.
- FLIPPED_BIT   one bit of what a read returns, or of what a write puts down, is wrong; nothing
                says so.
- DEATH         the process is killed at this call, before it or halfway through a write.

Not in the model: a disk that swaps the contents of two whole files, memory that flips bits after a
record was proved, and a file system that loses completed renames without a loss of power.

Against all of it: a key's right bytes or a miss, never an exception out of a tier or handler, and
full service once the faults end.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtier.core.records.record import ALIGN, Buffer
from kvtier.core.system.disk import AnyPath, Disk

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
