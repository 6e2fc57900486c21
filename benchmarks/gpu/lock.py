"""Copies beside an engine's thread that is busy in Python, by how long it may keep Python's lock.

    python -m benchmarks.gpu.lock              JSON=result.json python -m benchmarks.gpu.lock

Needs no GPU: the device is pretended. Its link and kernels, and what the host does to begin them,
take as long as they did on an H100 (docs/how_it_works/gpu.md). All else that the host does is real.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np

from benchmarks.gpu.arena import LAYERS, LOAD, NAMESPACE, RECORD_BYTES, STORE, Host, chunk_of
from benchmarks.report import Report
from kvtier.device.copier import (
    Blocks,
    Copies,
    DeviceLayout,
    DeviceTensor,
    Ints,
    Job,
    PageRef,
    Prover,
)
from kvtier.device.cuda.copier import CudaCopier
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import Header, record_bytes
from kvtier.slab import layout as table
from kvtier.types import block_key

LINK_BYTES_PER_S = 55e9
PAGES_S, SUMS_S = 200e-6, 180e-6
"""What gathering 64 MiB of pages takes, on a sixteenth of the device, and their checksums."""
LAUNCH_S, CROSS_S, MARK_S, WAKE_S = 42e-6, 75e-6, 5e-6, 45e-6
"""How long a thread keeps the lock to begin kernels, or a copy, or to mark a place in a stream; and
how late it wakes up."""
PAGE = 64 << 10
RECORDS, JOBS, TURNS = 32, 16, 5
KEPT_S = (5e-3, 1e-3, 5e-4, 2e-4, 1e-4)
SPIN = 2000


class Event:
    """Something that a device will have done at a certain time."""

    def __init__(self, at: float) -> None:
        self._at = at

    def synchronize(self) -> None:
        left = self._at - time.perf_counter()
        if left > 0:
            time.sleep(left + WAKE_S)


def keep_the_lock(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Link:
    """One direction: what crosses it does so one after the other."""

    def __init__(self) -> None:
        self._free = 0.0
        self._lock = threading.Lock()

    def cross(self, size: int) -> float:
        """When so many bytes will have arrived."""
        with self._lock:
            self._free = max(time.perf_counter(), self._free) + size / LINK_BYTES_PER_S
            return self._free


class Buffer:
    """A stage, or a lane, that knows when its work will be done."""

    def __init__(self, link: Link, part_bytes: int, rows: int) -> None:
        self._link = link
        self._part_bytes = part_bytes
        self._at = 0.0
        self.rows: Sequence[int] = [rows]

    def _takes(self, seconds: float) -> None:
        keep_the_lock(LAUNCH_S)
        self._at = max(time.perf_counter(), self._at) + seconds

    def gather(self, group: int, ids: Ints) -> None:
        self._takes(PAGES_S)

    def scatter(self, group: int, ids: Ints) -> None:
        self._takes(PAGES_S)

    def fetch(self, group: int, addresses: Ints) -> object:
        keep_the_lock(CROSS_S)
        self._at = max(self._at, self._link.cross(len(addresses) * self._part_bytes))
        return addresses

    send = fetch

    def digest(self, group: int, rows: int) -> None:
        self._takes(SUMS_S)

    def sums(self, group: int, rows: int) -> list[int]:
        return [0] * rows

    def record(self) -> Event:
        keep_the_lock(MARK_S)
        return Event(self._at)

    def after(self, event: object) -> None:
        raise NotImplementedError("all goes by way of buffers")

    def to_device(self, copies: Copies) -> object:
        raise NotImplementedError("all goes by way of buffers")

    to_host = to_device


class Device:
    """An accelerator."""

    def __init__(self) -> None:
        self._links = {True: Link(), False: Link()}

    def attach(self) -> None:
        """Every thread can use it."""

    def mark(self) -> Event:
        return Event(0.0)

    def lane(self, *, urgent: bool) -> Buffer:
        return Buffer(self._links[urgent], 0, 0)

    def stages(self, layout: DeviceLayout, batch_bytes: int, *, urgent: bool) -> list[Buffer]:
        (size,) = layout.part_bytes
        return [Buffer(self._links[urgent], size, batch_bytes // size) for _ in range(3)]


class Arena:
    """A copier and its slots, all of them full, or all reserved."""

    def __init__(self, kind: TransferKind, device: Device) -> None:
        self._kind = kind
        self._names = itertools.count()
        self._per_chunk = chunk_of(PAGE)
        count = RECORDS * self._per_chunk
        layers = range(LAYERS)
        tensors = tuple(DeviceTensor(layer << 40, count, PAGE, PAGE) for layer in layers)
        refs = tuple(PageRef(layer, PAGE) for layer in layers)
        layout = DeviceLayout(tensors, (refs,), self._per_chunk)
        self._host = host = Host(RECORDS, record_bytes(*layout.part_bytes))
        self._keys = [block_key(slot.to_bytes(32, "big"), 0) for slot in range(RECORDS)]
        for slot, key in enumerate(self._keys):
            host.entries[slot] = table.pack_entries(table.VALID, [key], 1, 0)
            Header(key, NAMESPACE, layout.group_bytes[0]).write(host.record(slot))
        if kind is STORE:
            self.reserve(range(RECORDS))
        self._blocks = np.random.default_rng(0).permutation(count)
        self.copier = CudaCopier(layout, device, host, NAMESPACE)
        self.copier.prepared.wait()

    def reserve(self, slots: range) -> None:
        """Let these wait for stores."""
        for slot in slots:
            entry = table.pack_entries(table.RESERVED, [self._keys[slot]], 1, 0)
            self._host.entries[slot] = entry

    def job(self, kind: TransferKind, slots: range) -> Job:
        """All of these slots, from and to blocks all over the device."""
        ids = self._blocks[slots.start * self._per_chunk : slots.stop * self._per_chunk]
        return Job(
            id=next(self._names),
            kind=kind,
            keys=self._keys[slots.start : slots.stop],
            slots=slots,
            blocks=Blocks(ids, [len(ids)], [0]),
            deadline=float("inf"),
        )

    def turn(self, meanwhile: Callable[[], int]) -> tuple[float, float]:
        """Gigabytes a second that are copied, and what the engine's thread gets done a second."""
        done = got = 0
        began = time.perf_counter()
        for _ in range(JOBS):
            self.copier.submit(self.job(self._kind, range(RECORDS)))
        while done < JOBS:
            got += meanwhile()
            results = self.copier.poll()
            assert all(result.ok for result in results)
            done += len(results)
        seconds = time.perf_counter() - began
        return JOBS * RECORDS * RECORD_BYTES / seconds / 1e9, got / seconds


def as_the_device_says(_prover: Prover, _slot: int) -> int:
    return 0


def wait() -> int:
    time.sleep(2e-4)
    return 0


def compute() -> int:
    """About a tenth of a millisecond of Python."""
    for _ in range(SPIN):
        pass
    return 1


def compute_alone() -> float:
    began, got = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < 0.3:
        got += compute()
    return got / taken


def main() -> None:
    report = Report(
        "copies beside an engine's thread that is busy in Python, on a pretended device"
    )
    usual = sys.getswitchinterval()
    with mock.patch.object(Prover, "stated", as_the_device_says):
        for kind in (LOAD, STORE):
            arena = Arena(kind, Device())
            free = [arena.turn(wait)[0] for _ in range(TURNS)]
            alone = []
            turns: dict[float, list[tuple[float, float]]] = {kept: [] for kept in KEPT_S}
            for _ in range(TURNS):
                alone.append(compute_alone())
                for kept, found in turns.items():
                    sys.setswitchinterval(kept)
                    found.append(arena.turn(compute))
            arena.copier.close()
            report.add(f"{kind.value}s, the engine's thread waits", statistics.median(free), "GB/s")
            for kept, found in turns.items():
                speed, got = (statistics.median(column) for column in zip(*found, strict=True))
                what = f"{kind.value}s, it computes, and keeps the lock for {kept * 1e3:g} ms"
                report.add(what, speed, "GB/s")
                lost = (1 - got / statistics.median(alone)) / speed * 1e3
                report.add("    a gigabyte takes from it", lost, "ms")
    sys.setswitchinterval(usual)
    report.finish()


if __name__ == "__main__":
    main()
