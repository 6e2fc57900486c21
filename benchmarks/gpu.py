"""Copies between a GPU and pinned host memory: speed, duplex, disturbance, identical bytes.

Needs torch with CUDA and this checkout: `make bench-gpu`. Contestants take turns in one run; every
figure is the median of its turns. One turn moves about a gigabyte.
"""

from __future__ import annotations

import itertools
import mmap
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report
from kvtier.core.record import Buffer, record_bytes
from kvtier.core.slab import layout as table
from kvtier.core.transfer import TransferKind
from kvtier.device.cuda import KERNEL_BELOW, Cuda, CudaRegistrar, kernel_copy, runtime_copy
from kvtier.device.cuda_copy import CudaCopier
from kvtier.device.gds import probe
from kvtier.device.jobs import Job
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.device.pinned import PinnedMemory
from kvtier.device.plan import Blocks, Copies, cut, describe
from kvtier.types import BlockKey, block_key

LAYERS = 32
TURN_BYTES = 1 << 30
PAGES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20]
NAMESPACE = bytes(16)
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE


class Host:
    """A pinned region of slots."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._map = mmap.mmap(-1, slots * slot_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._slot_bytes = slot_bytes
        self.data = memoryview(self._map)
        self.entries = [table.FREE_ENTRY] * slots

    def record(self, slot: int) -> Buffer:
        return self.data[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def state(self, slot: int) -> int:
        return self.entries[slot][0]

    def entry(self, slot: int) -> bytes:
        return self.entries[slot]


class Arena:
    """KV tensors on the GPU, a region in host memory, and a copier between them."""

    def __init__(self, torch: Any, page: int, records: int, per_chunk: int = 1) -> None:
        self.torch = torch
        self.records = records
        self.blocks = 2 * records * per_chunk
        self.pool = torch.randint(
            0, 255, (LAYERS, self.blocks, page), dtype=torch.uint8, device="cuda"
        )
        tensors = tuple(
            DeviceTensor(self.pool[layer].data_ptr(), self.blocks, page, page)
            for layer in range(LAYERS)
        )
        refs = tuple(PageRef(layer, page) for layer in range(LAYERS))
        self.layout = DeviceLayout(tensors, (refs,), per_chunk)
        self.bytes = records * self.layout.part_bytes[0]
        self.host = Host(records, record_bytes(self.layout.part_bytes[0]))
        slot_bytes = len(self.host.record(0))
        self.memory = PinnedMemory(self.host.data, slot_bytes, CudaRegistrar())
        self.device = Cuda(0)
        if self.memory.pin():
            self.device.build_kernel()
        self.copier = CudaCopier(
            self.layout, self.device, self.host, NAMESPACE, on_close=self.memory.close
        )
        self.keys: list[BlockKey] = [
            block_key(index.to_bytes(8, "big")) for index in range(records)
        ]
        self._names = itertools.count()
        self._finished: set[int] = set()
        self._random = np.random.default_rng(0)

    def shuffled(self) -> Blocks:
        """Blocks in an order that leaves no neighbours to merge."""
        count = self.records * self.layout.blocks_per_chunk
        return Blocks(self._random.permutation(self.blocks)[:count], [count], [0])

    def submit(self, kind: TransferKind, slots: range, blocks: Blocks) -> int:
        state = table.VALID if kind is LOAD else table.RESERVED
        for slot in slots:
            self.host.entries[slot] = table.pack_entry(state, self.keys[slot], 1, 0)
        name = next(self._names)
        keys = [self.keys[slot] for slot in slots]
        job = Job(id=name, kind=kind, keys=keys, slots=slots, blocks=blocks, deadline=float("inf"))
        self.copier.submit(job)
        return name

    def finish(self, names: Iterable[int]) -> None:
        """Wait for jobs to be complete, sealing included."""
        waiting = set(names)
        while not waiting <= self._finished:
            for result in self.copier.poll():
                assert result.ok, result.outcomes
                self._finished.add(result.id)
            time.sleep(0.0002)
        self._finished -= waiting

    def move(self, kind: TransferKind, blocks: Blocks) -> None:
        self.finish([self.submit(kind, range(self.records), blocks)])

    def copies(self, blocks: Blocks) -> Copies:
        first = int(np.frombuffer(self.host.data, np.uint8).ctypes.data)
        records = first + np.arange(self.records, dtype=np.int64) * len(self.host.record(0))
        return describe(self.layout, blocks, cut(self.layout, blocks), records)

    def close(self) -> None:
        self.copier.close()
        del self.pool
        self.torch.cuda.empty_cache()


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turns(contestants: dict[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Median seconds of each contestant; the first turn warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, action in contestants.items():
            taken = seconds_of(action)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def page_sizes(torch: Any, report: Report) -> None:
    """Loads and stores beside one large copy and beside torch, for pages of many sizes."""
    plain = torch.empty(TURN_BYTES, dtype=torch.uint8).pin_memory()
    large = torch.empty(TURN_BYTES, dtype=torch.uint8, device="cuda")
    for page in PAGES:
        arena = Arena(torch, page, TURN_BYTES // (LAYERS * page))
        blocks = arena.shuffled()
        index = torch.from_numpy(blocks.ids).cuda()
        staging = torch.empty((LAYERS, arena.records, page), dtype=torch.uint8, device="cuda")
        pinned = torch.empty((LAYERS, arena.records, page), dtype=torch.uint8).pin_memory()

        def synced(action: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                action()
                torch.cuda.synchronize()

            return run

        def torch_store(arena: Arena = arena, index: Any = index, staging: Any = staging) -> None:
            torch.index_select(arena.pool, 1, index, out=staging)

        times = in_turns(
            {
                "store": lambda a=arena, b=blocks: a.move(STORE, b),  # type: ignore[misc]
                "load": lambda a=arena, b=blocks: a.move(LOAD, b),  # type: ignore[misc]
                "large to host": synced(lambda: plain.copy_(large, non_blocking=True)),
                "large to device": synced(lambda: large.copy_(plain, non_blocking=True)),
                "torch store": synced(
                    lambda t=torch_store, p=pinned, s=staging: (t(), p.copy_(s, non_blocking=True))
                ),
                "torch load": synced(
                    lambda a=arena, i=index, p=pinned, s=staging: (
                        s.copy_(p, non_blocking=True),
                        a.pool.index_copy_(1, i, s),
                    )
                ),
            }
        )
        size = f"pages of {page >> 10} KiB"
        for name, baseline in (("store", "large to host"), ("load", "large to device")):
            report.add(f"{name}, {size}", arena.bytes / times[name] / 1e9, "GB/s")
            ratio = times[baseline] * arena.bytes / TURN_BYTES / times[name]
            report.at_least(f"{name}, {size}, of one large copy", ratio, "", 0.9)
            report.add(f"{name}, {size}, of torch", times[f"torch {name}"] / times[name], "times")
        arena.close()


def kernel_or_engine(torch: Any, report: Report) -> None:
    """Where the kernel for small pages stops being faster than the copy engine."""
    engine, kernel = runtime_copy(torch), kernel_copy(torch, 0)
    for page in (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10):
        arena = Arena(torch, page, (TURN_BYTES >> 2) // (LAYERS * page))
        copies = arena.copies(arena.shuffled())

        def to_device(copy: Any, copies: Copies = copies) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                held = copy(copies.device, copies.host, copies.sizes, True)
                torch.cuda.current_stream().synchronize()
                del held

        contestants: dict[str, Callable[[], object]] = {"engine": lambda f=to_device: f(engine)}  # type: ignore[misc]
        if kernel is not None:
            contestants["kernel"] = lambda f=to_device: f(kernel)  # type: ignore[misc]
        for name, taken in in_turns(contestants).items():
            report.add(f"{name}, to device, {page >> 10} KiB", arena.bytes / taken / 1e9, "GB/s")
        arena.close()
    report.add("kernel is used below", KERNEL_BELOW / 1024, "KiB")


def disturbance(torch: Any, report: Report) -> None:
    """What loads lose while stores run, and a matrix product while both run."""
    records = TURN_BYTES // (LAYERS * (64 << 10)) // 2 * 2
    arena = Arena(torch, 64 << 10, records)
    half = records // 2
    ids = arena.shuffled().ids
    loads, stores = Blocks(ids[:half], [half], [0]), Blocks(ids[half:], [half], [0])
    arena.move(STORE, Blocks(ids, [records], [0]))
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def load(rounds: int = 4) -> None:
        arena.finish([arena.submit(LOAD, range(half), loads) for _ in range(rounds)])

    def duplex(rounds: int = 4) -> float:
        """Seconds that the loads take while stores, which go on longer, are running."""
        names = [arena.submit(STORE, range(half, records), stores) for _ in range(2 * rounds)]
        taken = seconds_of(lambda: load(rounds))
        arena.finish(names)
        return taken

    def product() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(100):
            torch.mm(matrix, matrix)
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def product_during_copies() -> float:
        names = [arena.submit(STORE, range(half, records), stores) for _ in range(24)]
        names += [arena.submit(LOAD, range(half), loads) for _ in range(24)]
        taken = product()
        arena.finish(names)
        return taken

    turns = [(seconds_of(load), duplex(), product(), product_during_copies()) for _ in range(6)][1:]
    alone, both, calm, busy = (statistics.median(column) for column in zip(*turns, strict=True))
    report.at_most("loads lose while stores run", (both / alone - 1) * 100, "%", 10)
    report.at_most("a matrix product loses while both run", (busy / calm - 1) * 100, "%", 3)
    arena.close()


def identity(torch: Any, report: Report, pages: int = 1_000_000) -> None:
    """Random pages out and back, to other blocks: all of them must be the same bytes."""
    page, moved, wrong = 16 << 10, 0, 0
    arena = Arena(torch, page, 512, per_chunk=4)
    while moved < pages:
        away, back = arena.shuffled(), arena.shuffled()
        arena.pool.random_(0, 255)
        wanted = arena.pool[:, torch.from_numpy(away.ids).cuda()]
        arena.move(STORE, away)
        arena.move(LOAD, back)
        found = arena.pool[:, torch.from_numpy(back.ids).cuda()]
        wrong += int((wanted != found).any(dim=2).sum())
        moved += wanted.shape[0] * wanted.shape[1]
    report.at_most(f"wrong pages of {moved}", wrong, "", 0)
    arena.close()


def main() -> None:
    """Run everything; tell the device and the date first, because figures mean nothing without."""
    try:
        import torch
    except ImportError:
        raise SystemExit("no torch here: make bench-gpu PYTHON=one-that-has-it") from None
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark measures one (docs/GPU.md)")
    name = torch.cuda.get_device_name(0)
    print(
        f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
    )
    report = Report(f"copies between {name} and pinned host memory")
    for part in (page_sizes, kernel_or_engine, disturbance, identity):
        taken = seconds_of(lambda part=part: part(torch, report))  # type: ignore[misc]
        print(f"{part.__name__}: {taken:.0f} s", flush=True)
    reason = probe(Path.cwd())
    print(f"GPUDirect Storage: {reason or 'works here'}")
    report.finish()


if __name__ == "__main__":
    main()
