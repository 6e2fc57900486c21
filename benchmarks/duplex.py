"""What loads lose while stores run, on a pretended link that is slower when used both ways.

    python -m benchmarks.duplex             JSON=result.json python -m benchmarks.duplex

Needs no GPU, as `benchmarks.lock`. The link of an H200 was measured to lose 10 to 18 % of each
direction while the other one is used, too (docs/GPU.md).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from unittest import mock

from benchmarks import lock
from benchmarks.gpu_arena import LOAD, RECORD_BYTES, STORE
from benchmarks.lock import RECORDS, TURNS, Arena, as_the_device_says
from benchmarks.report import Report
from kvtier.core.transfer import TransferKind
from kvtier.device.jobs import Prover
from kvtier.device.plan import Ints

BOTH_WAYS = 0.84
"""Of a direction's speed, while the other one is used, too."""
SLICE_BYTES = 8 << 20
ROUNDS = 16
NAP_S = 2e-4


class Direction:
    """Moves what is given to it, slice by slice, in a thread of its own."""

    def __init__(self) -> None:
        self.busy = False
        self.other = self
        self._waiting: deque[tuple[int, threading.Event]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def cross(self, size: int) -> threading.Event:
        """Set when so many bytes will have arrived."""
        arrived = threading.Event()
        with self._changed:
            self._waiting.append((size, arrived))
            self._changed.notify()
        return arrived

    def _run(self) -> None:
        due = 0.0
        while True:
            with self._changed:
                while not self._waiting:
                    self.busy = False
                    self._changed.wait()
                self.busy = True
                size, arrived = self._waiting.popleft()
            due = max(due, time.perf_counter() - NAP_S)  # a thread that woke late catches up
            for at in range(0, size, SLICE_BYTES):
                speed = lock.LINK_BYTES_PER_S * (BOTH_WAYS if self.other.busy else 1)
                due += min(SLICE_BYTES, size - at) / speed
                lock.Event(due).synchronize()
            arrived.set()


class Event:
    """Something that has crossed the link, and what was to be done behind it."""

    def __init__(self, arrived: threading.Event | None, at: float) -> None:
        self._arrived = arrived
        self._then = lock.Event(at)

    def synchronize(self) -> None:
        if self._arrived is not None:
            self._arrived.wait()
        self._then.synchronize()


class Buffer(lock.Buffer):
    """A stage whose link is a `Direction`."""

    _direction: Direction
    _crossing: threading.Event | None = None

    def fetch(self, group: int, addresses: Ints) -> object:
        self._crossing = self._direction.cross(len(addresses) * self._part_bytes)
        return addresses

    send = fetch

    def _takes(self, seconds: float) -> None:
        self._crossing = None
        super()._takes(seconds)

    def digest(self, group: int, rows: int) -> None:
        """By kernels, while the next one crosses."""

    def record(self) -> Event:  # type: ignore[override]
        return Event(self._crossing, self._at)


class Device(lock.Device):
    """An accelerator with such a link."""

    def __init__(self) -> None:
        super().__init__()
        up, down = Direction(), Direction()
        up.other, down.other = down, up
        self._directions = {True: down, False: up}

    def buffer(self, size: int, rows: int, *, urgent: bool) -> Buffer:
        buffer = Buffer(self._links[urgent], size, rows)
        buffer._direction = self._directions[urgent]
        return buffer


class Halves(Arena):
    """Half of the slots are full, to be loaded; the others are reserved, to be stored to."""

    half = RECORDS // 2

    def __init__(self) -> None:
        super().__init__(LOAD, Device())
        self.reserve(range(self.half, RECORDS))

    def loads(self, *, beside_stores: bool) -> tuple[float, float]:
        """Gigabytes a second that are loaded, and stored meanwhile."""
        high = range(self.half, RECORDS)
        stores = self._begin(STORE, high, 3 * ROUNDS) if beside_stores else set()
        time.sleep(0.01)
        began = time.perf_counter()
        loads = self._begin(LOAD, range(self.half), ROUNDS)
        waiting = len(stores) - self._finish(loads)
        seconds = time.perf_counter() - began
        size = self.half * RECORD_BYTES / seconds / 1e9
        stored = (len(stores) - waiting) * size
        while waiting:
            time.sleep(NAP_S)
            waiting -= len(self.copier.poll())
        return ROUNDS * size, stored

    def _begin(self, kind: TransferKind, slots: range, rounds: int) -> set[int]:
        jobs = [self.job(kind, slots) for _ in range(rounds)]
        for job in jobs:
            self.copier.submit(job)
        return {job.id for job in jobs}

    def _finish(self, names: set[int]) -> int:
        """Wait for these; how many others have ended."""
        others = 0
        while names:
            time.sleep(NAP_S)
            for result in self.copier.poll():
                assert result.ok
                others += result.id not in names
                names.discard(result.id)
        return others


def main() -> None:
    report = Report("loads beside stores, on a pretended link")
    with mock.patch.object(Prover, "stated", as_the_device_says):
        arena = Halves()
        turns = [
            (*arena.loads(beside_stores=False), *arena.loads(beside_stores=True))
            for _ in range(TURNS + 1)
        ]
        arena.copier.close()
    alone, _, beside, stored = (statistics.median(each) for each in zip(*turns[1:], strict=True))
    report.add("loads alone", alone, "GB/s")
    report.add("loads while stores run", beside, "GB/s")
    report.add("stores meanwhile", stored, "GB/s")
    report.add("loads lose while stores run", (alone / beside - 1) * 100, "%")
    report.finish()


if __name__ == "__main__":
    main()
