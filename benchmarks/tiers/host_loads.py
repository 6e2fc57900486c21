"""A prompt's blocks out of CPU memory into an engine's KV tensors, beside plain copies of them.

    make bench-host-loads            JSON=result.json make bench-host-loads

All copy the same bytes out of the same region into the same tensors, in turns. kvtier's copier
proves each of them, numpy and torch copy them as they are, in one thread.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

from benchmarks.report import Report
from benchmarks.tiers.pages import Pages
from kvtier.interfaces.backend import TierContext, backend
from kvtier.interfaces.handler import RegionHandler
from kvtier.record import record as records
from kvtier.settings import Capacity, Persistence
from kvtier.types import Namespace, SlotSpec, block_key

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20}
PROMPT_BYTES = 64 << 20
MOST = 1.3
WARM_UP = 3


def measure(report: Report, label: str, payload: int, turns: int) -> None:
    """All contestants with blocks of one size."""
    count = PROMPT_BYTES // payload
    namespace = Namespace(facts={"model": "benchmark"}, group_bytes=(payload,))
    context = TierContext(namespace, f"benchmark-{os.getpid()}")
    cpu = backend("cpu")
    size = records.record_bytes(payload)
    settings = cpu.settings(
        capacity=Capacity.parse((count + 1) * (size + 64) + 16384),
        name="benchmark",
        persistence=Persistence.DISCARD,
    )
    tier = cpu.open_tier(settings, context)
    handler = cpu.open_handler(settings, context)
    assert isinstance(handler, RegionHandler)
    keys = [block_key(b"%d" % i) for i in range(count)]
    spec = tier.prepare_store(keys).spec
    assert isinstance(spec, SlotSpec)
    views = handler.views(spec)
    for key, view in zip(keys, views, strict=True):
        view[records.HEADER_BYTES : records.HEADER_BYTES + payload] = os.urandom(payload)
        records.seal(view, records.Header(key, namespace.digest, payload))
    tier.complete_store(keys)
    payloads = [view[records.HEADER_BYTES : records.HEADER_BYTES + payload] for view in views]
    pages = Pages(payload, count)
    begin, copier = pages.copier(handler.region, namespace.digest)
    contestants: dict[str, Callable[[], None]] = {
        "kvtier": lambda: begin(keys, spec.slots)(),
        "numpy": lambda: pages.copy(payloads),
        "torch": pages.by_torch(payloads),
    }
    walls, cpus = take_turns(contestants, turns)
    copier.close()
    handler.close()
    tier.close()
    summarize(report, f"{label} x {count}", walls, cpus)


Seconds = dict[str, list[float]]


def take_turns(contestants: dict[str, Callable[[], None]], turns: int) -> tuple[Seconds, Seconds]:
    """Wall and processor seconds of each, turn by turn; whoever begins changes."""
    walls: Seconds = defaultdict(list)
    cpus: Seconds = defaultdict(list)
    orders = itertools.cycle(itertools.permutations(contestants))
    for turn, order in zip(range(turns + WARM_UP), orders, strict=False):
        for name in order:
            cpu, wall = time.process_time(), time.perf_counter()
            contestants[name]()
            if turn >= WARM_UP:
                walls[name].append(time.perf_counter() - wall)
                cpus[name].append(time.process_time() - cpu)
    return walls, cpus


def summarize(report: Report, label: str, walls: Seconds, cpus: Seconds) -> None:
    """Medians, and kvtier's ratios to the others."""
    for name, seconds in walls.items():
        report.add(f"{label} {name}", median(seconds) * 1e3, "ms")
    for name in ("numpy", "torch"):
        report.at_most(f"{label} against {name}", ratio(walls, name), "x", MOST)
        report.add(f"{label} CPU against {name}", ratio(cpus, name), "x")


def ratio(found: Seconds, name: str) -> float:
    """The median over the turns."""
    return median(mine / plain for mine, plain in zip(found["kvtier"], found[name], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--blocks", choices=SIZES, action="append")
    parser.add_argument("--turns", type=int, default=60)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    report = Report("Loads from CPU memory, all proved, beside plain copies")
    for label in arguments.blocks or SIZES:
        measure(report, label, SIZES[label], arguments.turns)
    report.finish()


if __name__ == "__main__":
    main()
