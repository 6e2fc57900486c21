"""CPU memory that the engines of a machine share: how much they hold together, and how much of a
trace they hit.

    python -m benchmarks.tiers.shared_memory

All with real tiers in one process, and no engine above them. Four that serve the same prompts hold
them once. A trace whose requests go to four engines by turns is hit nearly as often as by one
engine that has all the memory.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.eviction.workloads import WORKLOADS
from benchmarks.report import Report
from kvtier.backends.cpu import BACKEND, CpuSettings, CpuTier
from kvtier.cli.trace_simulation import Request, read_trace
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import record_bytes
from kvtier.settings import Capacity, Persistence
from kvtier.testing.media import make_memory_folder
from kvtier.types import BlockKey, Namespace, Presence, block_key

ENGINES = 4
SMALL = Namespace(facts={"model": "shared"}, group_bytes=(160 << 10,))
LARGE = Namespace(facts={"model": "shared"}, group_bytes=(1 << 20,))
SERVED = 1 << 30
HELD_MOST, POINTS_MOST = 1.3, 1.0
BLOCKS = 6000
_ROUNDS = 1000


@contextmanager
def engines(count: int, namespace: Namespace, blocks: int) -> Iterator[list[CpuTier]]:
    """So many tiers that share room for so many blocks, each with its part of it."""
    folder = make_memory_folder("bench")
    size = blocks * (record_bytes(namespace.payload_bytes) + 64)
    settings = CpuSettings(
        path=str(folder),
        capacity=Capacity.parse(size + size // 100 + (1 << 19)),
        persistence=Persistence.DISCARD,
    )
    try:
        with ExitStack() as stack:
            tiers: list[CpuTier] = []
            for number in range(count):
                context = TierContext(namespace, f"engine-{number}")
                tiers.append(BACKEND.open_tier(settings, context))
                stack.callback(tiers[-1].close)
            for tier in itertools.chain.from_iterable([tiers] * _ROUNDS):
                if all(each.stats().free >= blocks * 4 // 5 // count for each in tiers):
                    break
                tier.prepare_store([])
                tier.refresh()
            yield tiers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve(tier: CpuTier, keys: Sequence[BlockKey]) -> int:
    """What a request for these blocks does to a tier; how many of them it hits."""
    found = tier.lookup(keys)
    hits = next((at for at, each in enumerate(found) if each is not Presence.HIT), len(keys))
    tier.prepare_load(keys[:hits])
    tier.touch(keys)
    tier.complete_store(tier.prepare_store(keys[hits:]).keys)
    tier.complete_load(keys[:hits])
    return hits


def hold_once(report: Report) -> None:
    """All engines serve the same prompts one after the other, with room for all that they store."""
    blocks = SERVED // LARGE.payload_bytes
    keys = [block_key(f"{number}".encode()) for number in range(blocks)]
    prompts = [keys[at : at + 16] for at in range(0, blocks, 16)]
    with engines(ENGINES, LARGE, ENGINES * blocks + blocks) as tiers:
        for number, prompt in enumerate(prompts * ENGINES):
            tier = tiers[(number + number // len(prompts)) % ENGINES]
            serve(tier, prompt)
            for other in tiers:
                other.refresh()
        held = (
            sum(len(tier._own_among(list(tier._where.values()))) for tier in tiers)
            * LARGE.payload_bytes
        )
        hits = sum(tier.stats().neighbour_loads for tier in tiers)
    name = f"{ENGINES} engines that serve the same 1 GiB hold"
    report.at_most(name, held / SERVED, "GiB", HELD_MOST)
    report.add("blocks that they read from their neighbours", hits, "blocks")


def percent_hit(requests: Sequence[Request], count: int) -> float:
    """Hits in percent of the second half of a trace that goes to so many engines by turns."""
    hits = asked = 0
    with engines(count, SMALL, BLOCKS) as tiers:
        now = [0.0]
        for tier in tiers:
            tier._clock = tier.retained._clock = lambda: now[0]
        for number, request in enumerate(requests):
            now[0] = request.time
            keys = [block_key(block.to_bytes(8, "big")) for block in request.blocks[:BLOCKS]]
            found = serve(tiers[number % count], keys)
            if number >= len(requests) // 2:
                hits, asked = hits + found, asked + len(keys)
            for tier in tiers if count > 1 else ():
                tier._next_heard = 0.0
                tier._keeper.work()
                tier._keeper.when_idle()
    return 100.0 * hits / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--synthetic", choices=WORKLOADS, action="append")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    report = Report("CPU memory that engines share")
    hold_once(report)
    traces = {name: WORKLOADS[name](0) for name in arguments.synthetic or ["agents", "documents"]}
    if arguments.trace:
        traces = {arguments.trace.name: read_trace(arguments.trace)}
    for name, requests in traces.items():
        alone, split = (percent_hit(requests, count) for count in (1, ENGINES))
        report.add(f"{name}: one engine hits", alone, "%")
        points = alone - split
        report.at_most(f"{name}: split over {ENGINES}, less by", points, "points", POINTS_MOST)
    report.finish()


if __name__ == "__main__":
    main()
