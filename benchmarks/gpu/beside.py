"""What loads and stores lose beside each other, and what an engine loses while both run."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.arena import LAYERS, LOAD, STORE, Arena, chunk_of, even_layout, seconds_of
from benchmarks.report import Report
from kvtier.device.layout import DeviceBlocks

SIZE = 4 << 30
SIDE = 8192
PRODUCTS = 300  # half a second's: longer than loads take beside them
TURNS, ROUNDS, FEW_ROUNDS = 5, 24, 4
"""How often disturbance is measured, and rounds of each kind that disturb meanwhile."""
TURNS_S = 60.0
"""After so long no other turn is begun: where copies are slow, a few say more than none."""
JOBS = 8
"""In one round of stores: those that have ended are counted."""


class Link:
    """Large copies both ways, of which neither gathers, proves or waits for anything."""

    def __init__(self, torch: Any) -> None:
        def memory(**options: Any) -> Any:
            return torch.empty(1 << 30, dtype=torch.uint8, **options)

        self._torch = torch
        self._streams = [torch.cuda.Stream(priority=priority) for priority in (-1, 0)]
        self._pairs = [(memory(device="cuda"), memory(pin_memory=True)) for _ in range(2)]

    def _queue(self, count: int, *, out: bool) -> None:
        """Copies to the host, or to the device."""
        device, host = self._pairs[out]
        target, source = (host, device) if out else (device, host)
        with self._torch.cuda.stream(self._streams[out]):
            for _ in range(count):
                target.copy_(source, non_blocking=True)

    def _to_device(self) -> float:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._streams[0])
        self._queue(4, out=False)
        stop.record(self._streams[0])
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def beside(self, action: Callable[[], float]) -> float:
        """What an action says while both directions are full."""
        self._queue(16, out=False)
        self._queue(16, out=True)
        result = action()
        self._torch.cuda.synchronize()
        return result

    def loses(self) -> float:
        """How much longer copies to the device take beside copies to the host, in percent."""
        alone = self._to_device()
        self._queue(16, out=True)
        beside = self._to_device()
        self._torch.cuda.synchronize()
        return (beside / alone - 1) * 100


class Duplex:
    """Loads of one half of the records, stores of the other."""

    def __init__(self, torch: Any, size: int) -> None:
        page = 64 << 10
        per_chunk = chunk_of(page)
        self.half = max(1, size // (LAYERS * page * per_chunk) // 2)
        records = 2 * self.half
        pool, layout = even_layout(torch, page, 2 * records * per_chunk, per_chunk)
        self.arena = arena = Arena(torch, pool, layout, records)
        ids, count = arena.shuffled().ids, self.half * per_chunk
        self._loads = DeviceBlocks(ids[:count], [count], [0])
        self._stores: list[tuple[range, DeviceBlocks]] = []
        each = -(-self.half // JOBS)
        for first in range(self.half, records, each):
            slots = range(first, min(first + each, records))
            mine = ids[first * per_chunk :][: len(slots) * per_chunk]
            self._stores.append((slots, DeviceBlocks(mine, [len(mine)], [0])))
        arena.finish([arena.submit(STORE, self._low, self._loads)])
        self.bytes = 4 * arena.bytes // 2
        self.outlasted = True

    @property
    def _low(self) -> range:
        return range(self.half)

    def begin_loads(self, rounds: int) -> list[int]:
        return [self.arena.submit(LOAD, self._low, self._loads) for _ in range(rounds)]

    def begin_stores(self, rounds: int) -> list[int]:
        jobs = self._stores * rounds
        return [self.arena.submit(STORE, slots, blocks) for slots, blocks in jobs]

    def load(self, rounds: int = 4) -> None:
        self.arena.finish(self.begin_loads(rounds))

    def store(self, rounds: int = 4) -> None:
        self.arena.finish(self.begin_stores(rounds))

    def load_beside_stores(self, rounds: int = 4) -> tuple[float, float]:
        """Seconds that the loads take while stores, which go on longer, are running; and those that
        as many stores would take, if they went on as they did meanwhile."""
        names = self.begin_stores(3 * rounds)
        before = self.arena.ended(set(names))
        taken = seconds_of(functools.partial(self.load, rounds))
        stored = self.arena.ended(set(names)) - before
        self.outlasted &= before + stored < len(names)
        self.arena.finish(names)
        # Where none has ended, half of one may have been copied.
        return taken, taken * len(names) / 3 / max(stored, 0.5)

    def load_beside_python(self) -> float:
        """Seconds that the loads take while this thread is busy in Python, as an engine's is."""
        names, started = set(self.begin_loads(FEW_ROUNDS)), time.perf_counter()
        while not self.arena.finished(names):
            sum(range(5000))
        taken = time.perf_counter() - started
        self.arena.finish(names)
        return taken

    def load_beside_products(self, queue: Callable[[], Any]) -> float:
        """Seconds that the loads take while the device does what `queue` gives it, whose kernels
        those of loads find their places between, as between a model's."""
        names, started = self.begin_loads(FEW_ROUNDS), time.perf_counter()
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
        torch.mm(matrix, matrix)  # the device is busy until the first that counts is queued
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


def small_copy_of(torch: Any, *, to_host: bool = False) -> Callable[[], float]:
    """A few bytes to the device, as an engine sends before each step, or to the host, as it fetches
    after each: they may have to wait behind what loads, or stores, have on the link. It says how
    long one takes, in microseconds."""
    host = torch.zeros(1024, dtype=torch.int32, pin_memory=True)
    there = torch.zeros(1024, dtype=torch.int32, device="cuda")

    def copies() -> None:
        for _ in range(30):
            (host if to_host else there).copy_(there if to_host else host, non_blocking=True)
            torch.cuda.current_stream().synchronize()

    return lambda: seconds_of(copies) / 30 * 1e6


def python_loop() -> float:
    """What an engine's own thread does between its launches: many short calls, between which it may
    give the GIL to others; seconds."""
    return seconds_of(lambda: [sum(range(5000)) for _ in range(1000)])


def _repeated(turn: Callable[[], tuple[float, ...]]) -> list[tuple[float, ...]]:
    """What several turns say, but for the first, which warms up."""
    began = time.perf_counter()
    turns = [turn()]
    while len(turns) < 2 or (len(turns) <= TURNS and time.perf_counter() < began + TURNS_S):
        turns.append(turn())
    return turns[1:]


def disturbance(torch: Any, report: Report) -> None:
    """What loads lose while stores run, which go on meanwhile, or a loop in Python, or matrix
    products; and, while both run, a matrix product, a small copy, and a loop in Python."""
    duplex, product, products = Duplex(torch, SIZE), product_of(torch), products_of(torch)
    small, back = small_copy_of(torch), small_copy_of(torch, to_host=True)

    def disturbed() -> tuple[float, ...]:
        return product(), small(), back(), python_loop()

    def turn() -> tuple[float, ...]:
        alone = seconds_of(duplex.load), seconds_of(duplex.store)
        beside = *duplex.load_beside_stores(), duplex.load_beside_python()
        computing = duplex.load_beside_products(lambda: products(PRODUCTS)[1])
        return *alone, *beside, computing, *disturbed(), *duplex.beside(disturbed)

    medians = [statistics.median(column) for column in zip(*_repeated(turn), strict=True)]
    alone, stores, both, meanwhile, python, computing, *others = medians
    calm, prompt, there, free, busy, late, home, shared = others
    link = Link(torch)
    bare = statistics.median([link.loses() for _ in range(TURNS + 1)][1:])
    report.add("large copies to the device lose beside others to the host", bare, "%")
    crossed = statistics.median([link.beside(product) / product() for _ in range(TURNS + 1)][1:])
    report.add("a matrix product loses beside large copies both ways", (crossed - 1) * 100, "%")
    report.add("loads alone", duplex.bytes / alone / 1e9, "GB/s")
    report.add("stores alone", duplex.bytes / stores / 1e9, "GB/s")
    report.add("loads while stores run", duplex.bytes / both / 1e9, "GB/s")
    report.add("stores meanwhile", duplex.bytes / meanwhile / 1e9, "GB/s")
    report.at_most("loads lose while stores run", (both / alone - 1) * 100, "%", 10)
    report.add("loads lose while a loop in Python runs", (python / alone - 1) * 100, "%")
    report.add("loads while matrix products run", duplex.bytes / computing / 1e9, "GB/s")
    report.at_most("a matrix product loses while both run", (busy / calm - 1) * 100, "%", 3)
    report.add("a loop in Python loses while both run", (shared / free - 1) * 100, "%")
    report.add("4 KiB to the device take", prompt, "us")
    report.add("4 KiB to the device take while both run", late, "us")
    report.add("4 KiB to the host take", there, "us")
    report.add("4 KiB to the host take while both run", home, "us")
    if not duplex.outlasted:
        print("what disturbs ended before what is disturbed: these figures flatter", flush=True)
    duplex.arena.close()
