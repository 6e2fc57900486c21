"""Copies between a GPU, pinned host memory and a disk: speed, duplex, disturbance, identical bytes.

Needs torch with CUDA and this checkout: `make bench-gpu`. Contestants take turns in one run; every
figure is the median of its turns. What is known is printed and written (JSON=path) at once; a part
that fails, or takes too long, does not keep the others from running. FOLDER=path chooses the disk.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_arena import (
    LAYERS,
    LOAD,
    STORE,
    Arena,
    Unstaged,
    chunk_of,
    even_layout,
    in_turns,
    seconds_of,
)
from benchmarks.gpu_disk import one_hop
from benchmarks.gpu_kernels import steps_of_a_batch
from benchmarks.gpu_parts import PART_SECONDS, answer_of, run_part
from benchmarks.report import Report
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.device.plan import Blocks

TURN_BYTES = 4 << 30
PAGES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20]
IDENTITY_PAGES = 1_000_000
IDENTITY_RECORDS = 512
SIDE = 8192
PRODUCTS = 300  # half a second's: longer than loads take beside them
TURNS, ROUNDS = 5, 24
"""How often disturbance is measured, and jobs of each kind that disturb meanwhile."""
SECONDS = 270.0
"""For everything but the tests that `make bench-gpu` runs before."""


def page_sizes(torch: Any, report: Report) -> None:
    """Loads and stores beside one large copy and beside torch, for pages of many sizes."""
    plain = torch.empty(TURN_BYTES, dtype=torch.uint8, pin_memory=True)
    large = torch.empty(TURN_BYTES, dtype=torch.uint8, device="cuda")
    for page in PAGES:
        arena = Arena.even(torch, page, TURN_BYTES)
        blocks = arena.shuffled()
        index = torch.from_numpy(blocks.ids).cuda()
        shape = (LAYERS, arena.count, page)
        staging = torch.empty(shape, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        pool = arena.pool

        def synced(*actions: Callable[[], object]) -> None:
            for action in actions:
                action()
            torch.cuda.synchronize()

        part = functools.partial
        times = in_turns(
            {
                "store": part(arena.move, STORE, blocks),
                "load": part(arena.move, LOAD, blocks),
                "large to host": part(synced, part(plain.copy_, large, non_blocking=True)),
                "large to device": part(synced, part(large.copy_, plain, non_blocking=True)),
                "torch store": part(
                    synced,
                    part(torch.index_select, pool, 1, index, out=staging),
                    part(pinned.copy_, staging, non_blocking=True),
                ),
                "torch load": part(
                    synced,
                    part(staging.copy_, pinned, non_blocking=True),
                    part(pool.index_copy_, 1, index, staging),
                ),
            }
        )
        size = f"pages of {page >> 10} KiB"
        for name, baseline in (("store", "large to host"), ("load", "large to device")):
            report.add(f"{name}, {size}", arena.bytes / times[name] / 1e9, "GB/s")
            ratio = times[baseline] * arena.bytes / TURN_BYTES / times[name]
            report.at_least(f"{name}, {size}, of one large copy", ratio, "", 0.9)
            report.add(f"{name}, {size}, of torch", times[f"torch {name}"] / times[name], "times")
        for baseline in ("large to host", "large to device"):
            report.add(f"one {baseline}, {size}", TURN_BYTES / times[baseline] / 1e9, "GB/s")
        del staging, pinned, pool
        arena.close()


def unstaged(torch: Any, report: Report) -> None:
    """What copies page by page, which the host proves, reach: where staging is not possible."""
    for page in (16 << 10, 256 << 10, 2 << 20):
        arena = Arena.even(torch, page, TURN_BYTES, Unstaged(0))
        blocks = arena.shuffled()
        contestants = {
            "store": functools.partial(arena.move, STORE, blocks),
            "load": functools.partial(arena.move, LOAD, blocks),
        }
        for name, taken in in_turns(contestants, 3).items():
            speed = arena.bytes / taken / 1e9
            report.add(f"{name}, page by page, pages of {page >> 10} KiB", speed, "GB/s")
        arena.close()


class Link:
    """Large copies both ways, of which neither gathers, proves or waits for anything."""

    def __init__(self, torch: Any) -> None:
        def memory(**options: Any) -> Any:
            return torch.empty(1 << 30, dtype=torch.uint8, **options)

        self._torch = torch
        self._streams = [torch.cuda.Stream(priority=priority) for priority in (-1, 0)]
        self._pairs = [(memory(device="cuda"), memory(pin_memory=True)) for _ in range(2)]

    def _to_device(self) -> float:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream, (device, host) = self._streams[0], self._pairs[0]
        with self._torch.cuda.stream(stream):
            start.record(stream)
            for _ in range(4):
                device.copy_(host, non_blocking=True)
            stop.record(stream)
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def loses(self) -> float:
        """How much longer copies to the device take beside copies to the host, in percent."""
        alone = self._to_device()
        device, host = self._pairs[1]
        with self._torch.cuda.stream(self._streams[1]):
            for _ in range(16):
                host.copy_(device, non_blocking=True)
        beside = self._to_device()
        self._torch.cuda.synchronize()
        return (beside / alone - 1) * 100


class Duplex:
    """Loads of one half of the records, stores of the other."""

    def __init__(self, torch: Any, size: int, threads: int = 4) -> None:
        page = 64 << 10
        per_chunk = chunk_of(page)
        self.half = max(1, size // (LAYERS * page * per_chunk) // 2)
        records = 2 * self.half
        pool, layout = even_layout(torch, page, 2 * records * per_chunk, per_chunk)
        self.arena = arena = Arena(torch, pool, layout, records, threads=threads)
        ids, count = arena.shuffled().ids, self.half * per_chunk
        self._loads, self._stores = (
            Blocks(mine, [count], [0]) for mine in (ids[:count], ids[count:])
        )
        arena.finish([arena.submit(STORE, self._low, self._loads)])
        self.bytes = 4 * arena.bytes // 2
        self.outlasted = True

    @property
    def _low(self) -> range:
        return range(self.half)

    def begin_loads(self, rounds: int) -> list[int]:
        return [self.arena.submit(LOAD, self._low, self._loads) for _ in range(rounds)]

    def begin_stores(self, rounds: int) -> list[int]:
        high = range(self.half, 2 * self.half)
        return [self.arena.submit(STORE, high, self._stores) for _ in range(rounds)]

    def load(self, rounds: int = 4) -> None:
        self.arena.finish(self.begin_loads(rounds))

    def load_beside_stores(self, rounds: int = 4) -> float:
        """Seconds that the loads take while stores, which go on longer, are running."""
        names = self.begin_stores(3 * rounds)
        taken = seconds_of(functools.partial(self.load, rounds))
        self.outlasted &= not self.arena.finished(set(names))
        self.arena.finish(names)
        return taken

    def load_beside_python(self, rounds: int = 4) -> float:
        """Seconds that the loads take while this thread is busy in Python, as an engine's is."""
        names, started = set(self.begin_loads(rounds)), time.perf_counter()
        while not self.arena.finished(names):
            sum(range(5000))
        taken = time.perf_counter() - started
        self.arena.finish(names)
        return taken

    def load_beside_products(self, queue: Callable[[], Any], rounds: int = 4) -> float:
        """Seconds that the loads take while the device does what `queue` gives it, whose kernels
        those of loads find their places between, as between a model's."""
        names, started = self.begin_loads(rounds), time.perf_counter()
        end = queue()  # only now: loads wait for what the device had been given before
        self.arena.finish(names)
        taken = time.perf_counter() - started
        self.outlasted &= not end.query()
        end.synchronize()
        return taken

    def beside(self, action: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """What an action says that is done while both run."""
        both = self.begin_stores(ROUNDS), self.begin_loads(ROUNDS)
        time.sleep(0.01)
        result = action()
        self.outlasted &= not any(self.arena.finished(set(names)) for names in both)
        self.arena.finish([*both[0], *both[1]])
        return result


def products_of(torch: Any) -> Callable[[int], tuple[Any, Any]]:
    """Matrix products that keep the whole device busy; they are queued between two events."""
    matrix = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)

    def queue(count: int) -> tuple[Any, Any]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            torch.mm(matrix, matrix)
        stop.record()
        return start, stop

    return queue


def product_of(torch: Any) -> Callable[[], float]:
    """A matrix product; it says how long a hundred took."""
    queue = products_of(torch)

    def product() -> float:
        start, stop = queue(100)
        stop.synchronize()
        return float(start.elapsed_time(stop))

    return product


def small_copy_of(torch: Any) -> Callable[[], float]:
    """A few bytes to the device, as an engine sends before each step: they may have to wait behind
    what loads have on the link. It says how long one takes, in microseconds."""
    host = torch.zeros(1024, dtype=torch.int32, pin_memory=True)
    there = torch.zeros(1024, dtype=torch.int32, device="cuda")

    def copies() -> None:
        for _ in range(30):
            there.copy_(host, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    return lambda: seconds_of(copies) / 30 * 1e6


def python_loop() -> float:
    """What an engine's own thread does between its launches: many short calls, between which it may
    give Python's lock to others; seconds."""
    return seconds_of(lambda: [sum(range(5000)) for _ in range(1000)])


def disturbance(torch: Any, report: Report) -> None:
    """What loads lose while stores run, or a loop in Python, or matrix products; and, while both
    run, a matrix product, a small copy, and a loop in Python."""
    duplex, product, small = Duplex(torch, TURN_BYTES), product_of(torch), small_copy_of(torch)
    products = products_of(torch)

    def disturbed() -> tuple[float, ...]:
        return product(), small(), python_loop()

    def turn() -> tuple[float, ...]:
        loads = seconds_of(duplex.load), duplex.load_beside_stores(), duplex.load_beside_python()
        beside = duplex.load_beside_products(lambda: products(PRODUCTS)[1])
        return *loads, beside, *disturbed(), *duplex.beside(disturbed)

    turns = [turn() for _ in range(TURNS + 1)][1:]
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    alone, both, python, computing, calm, prompt, free, busy, late, shared = medians
    link = Link(torch)
    bare = statistics.median([link.loses() for _ in range(TURNS + 1)][1:])
    report.add("large copies to the device lose beside others to the host", bare, "%")
    report.add("loads alone", duplex.bytes / alone / 1e9, "GB/s")
    report.add("loads while stores run", duplex.bytes / both / 1e9, "GB/s")
    report.at_most("loads lose while stores run", (both / alone - 1) * 100, "%", 10)
    report.add("loads lose while a loop in Python runs", (python / alone - 1) * 100, "%")
    report.add("loads while matrix products run", duplex.bytes / computing / 1e9, "GB/s")
    report.at_most("a matrix product loses while both run", (busy / calm - 1) * 100, "%", 3)
    report.add("a loop in Python loses while both run", (shared / free - 1) * 100, "%")
    report.add("4 KiB to the device take", prompt, "us")
    report.add("4 KiB to the device take while both run", late, "us")
    if not duplex.outlasted:
        print("what disturbs ended before what is disturbed: these figures flatter", flush=True)
    duplex.arena.close()


def mixed_layout(torch: Any, blocks: int) -> tuple[list[Any], DeviceLayout]:
    """Two groups that share a tensor: padded pages, pages of another size, four blocks a chunk."""
    page, padding = 16 << 10, 512
    pools = [
        torch.randint(0, 255, (blocks, page + pad), dtype=torch.uint8, device="cuda")
        for pad in [padding] * (LAYERS - 8) + [0] * 8
    ]
    tensors = tuple(
        DeviceTensor(pool.data_ptr(), blocks, pool.stride(0), pool.shape[1]) for pool in pools
    )
    wide = tuple(PageRef(layer, page) for layer in range(LAYERS - 8))
    narrow = (PageRef(0, page - 8), *(PageRef(at, page // 2) for at in range(LAYERS - 8, LAYERS)))
    return pools, DeviceLayout(tensors, (wide, narrow), 4)


def identity(torch: Any, report: Report) -> None:
    """Random pages out, and back to other blocks from the middle of a chunk on: several groups,
    padding, and nothing else may have changed."""
    records, per_chunk = IDENTITY_RECORDS, 4
    count = records * per_chunk
    pools, layout = mixed_layout(torch, 4 * count)
    arena = Arena(torch, pools, layout, 2 * records)
    random = np.random.default_rng(1)
    moved = wrong = touched = 0
    while moved < IDENTITY_PAGES:
        ids = random.permutation(layout.blocks)[: 4 * count]
        skip = int(random.integers(1, per_chunk))
        away, back = ids[: 2 * count], ids[2 * count :]
        arena.move(STORE, Blocks(away, [count, count], [0, 0]))
        before = [pool.clone() for pool in pools]
        left = [back[skip:count], back[count + skip :]]
        sizes = [count - skip] * 2
        arena.move(LOAD, Blocks(np.concatenate(left), sizes, [skip, skip]))
        for group, refs in enumerate(layout.groups):
            sources = torch.from_numpy(away[group * count + skip : (group + 1) * count]).cuda()
            targets = torch.from_numpy(left[group]).cuda()
            for ref in refs:
                old, new = before[ref.tensor], pools[ref.tensor]
                wanted, found = old[sources, : ref.page_bytes], new[targets, : ref.page_bytes]
                wrong += int((wanted != found).any(dim=1).sum())
                old[targets, : ref.page_bytes] = found
                moved += len(targets)
        touched += sum(int((old != new).sum()) for old, new in zip(before, pools, strict=True))
        for pool in pools:
            pool.random_(0, 255)
    report.at_most(f"wrong pages of {moved}", wrong, "", 0)
    report.at_most("bytes changed that should not have been", touched, "", 0)
    arena.close()


def device_or_exit() -> tuple[Any, str, str]:
    """torch, the device's name and the date, which are printed, too."""
    try:
        import torch
    except ImportError:
        raise SystemExit("no torch here: PYTHON=one-that-has-it") from None

    # By another process: parts are forked, and this one may not have used CUDA by then.
    def name_of() -> str:
        return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""

    name = answer_of(name_of)
    if not name:
        raise SystemExit("no CUDA device: this benchmark measures one (docs/GPU.md)")
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    print(f"{name}, torch {torch.__version__}, {when} UTC, {os.cpu_count()} cores", flush=True)
    return torch, name, when


def main() -> None:
    """Run everything; tell the device and the date first, because figures mean nothing without."""
    torch, name, when = device_or_exit()
    report = Report(f"copies between {name}, pinned host memory and a disk, {when} UTC")
    disk = functools.partial(one_hop, folder=Path(os.environ.get("FOLDER", Path.cwd())))
    parts: dict[str, Callable[..., None]] = {
        "bytes": identity,
        "page sizes": page_sizes,
        "steps": steps_of_a_batch,
        "disturbance": disturbance,
        "disk": disk,
        "page by page": unstaged,
    }
    failed = []
    end = time.perf_counter() + SECONDS
    for title, part in parts.items():
        began = time.perf_counter()
        limit = min(PART_SECONDS, end - began)
        measure = functools.partial(part, torch)
        whole = limit > 0 and run_part(measure, report, limit)
        print(
            f"{title}: {time.perf_counter() - began:.0f} s{'' if whole else ', FAILED'}", flush=True
        )
        if not whole:
            failed.append(title)
    report.finish()
    if failed:
        sys.exit(f"these parts failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
