"""Eviction policies on a trace of requests: prefix hits and cost, beside the bound of Belady.

    python -m benchmarks.eviction --trace requests.jsonl [--half first|second|whole]
    python -m benchmarks.eviction --synthetic documents [--seed 1]

`--half second` replays the whole trace and counts the second half, so that every policy comes to it
as warm as it would be in service; `first` replays and counts the first half alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.eviction.reference_policies import EVERY_POLICY, new_policy
from benchmarks.eviction.replay import block_keys, replay, replay_belady
from benchmarks.eviction.workloads import CAPACITIES, WORKLOADS
from benchmarks.report import Report
from kvtier.cli.trace_simulation import Request, read_trace
from kvtier.errors import KVTierError
from kvtier.eviction import DEFAULT, EvictionPolicy

REFERENCES = ("lru", "s3fifo", "arc")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MARGIN_POINTS = -0.3
COST_US = 2.0


class Stopwatch:
    """Takes the CPU time of a policy's calls on the hot path."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.used = self.evicted = 0
        self.use_s = self.evict_s = 0.0
        use, evict = policy.use, policy.evict

        def timed_use(slots: Sequence[int], *more: Any, **named: Any) -> None:
            start = time.thread_time()
            use(slots, *more, **named)
            self.use_s += time.thread_time() - start
            self.used += len(slots)

        def timed_evict(count: int, pinned: Container[int] = ()) -> list[int]:
            start = time.thread_time()
            slots = evict(count, pinned)
            self.evict_s += time.thread_time() - start
            self.evicted += len(slots)
            return slots

        policy.use, policy.evict = timed_use, timed_evict  # type: ignore[method-assign]

    @property
    def use_us(self) -> float:
        """Microseconds for one block of a request."""
        return self.use_s / max(self.used, 1) * 1e6

    @property
    def evict_us(self) -> float:
        """Microseconds for one evicted block; 0 where nothing was."""
        return self.evict_s / max(self.evicted, 1) * 1e6


def measure(
    requests: Sequence[Request],
    count_from: int,
    names: Sequence[str],
    capacities: Sequence[int],
    report: Report,
) -> Table:
    """Replay every policy at every capacity; figures go into the report, hits into the table."""
    keys = block_keys(requests)
    replay(requests[: len(requests) // 10], new_policy(DEFAULT), capacities[0], 0, keys)
    hits: dict[str, list[float]] = {name: [] for name in (*names, "belady")}
    watches: dict[str, list[Stopwatch]] = {name: [] for name in names}
    sizes: dict[str, float] = {}
    for capacity in capacities:
        for name in names:
            policy = new_policy(name, capacity)
            watches[name].append(Stopwatch(policy))
            result = replay(requests, policy, capacity, count_from, keys)
            sizes[name] = policy.nbytes / capacity
            hits[name].append(result.percent)
            report.add(f"{name} at {capacity} blocks", result.percent, "% hits")
        hits["belady"].append(replay_belady(requests, capacity, count_from).percent)
        references = [name for name in REFERENCES if name in hits]
        if DEFAULT in hits and references:
            ahead = hits[DEFAULT][-1] - max(hits[name][-1] for name in references)
            what = f"{DEFAULT} above the best of {', '.join(references)} at {capacity} blocks"
            report.at_least(what, ahead, "points", MARGIN_POINTS)
    table = Table(title="hits in % of all references")
    headings = ("policy", *map(str, capacities), "use us", "evict us", "bytes a slot")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name in names:
        use_us = statistics.median(watch.use_us for watch in watches[name])
        evict_us = statistics.median(watch.evict_us for watch in watches[name])
        report.at_most(f"{name}: a block used", use_us, "us", COST_US)
        report.at_most(f"{name}: a block evicted", evict_us, "us", COST_US)
        report.add(f"{name}: memory a slot at {capacities[-1]} slots", sizes[name], "B")
        costs = (f"{use_us:.2f}", f"{evict_us:.2f}", f"{sizes[name]:.0f}")
        table.add_row(name, *(f"{value:.2f}" for value in hits[name]), *costs)
    table.add_row("belady", *(f"{value:.2f}" for value in hits["belady"]), "", "", "")
    return table


def _capacities(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise ValueError
    return numbers


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.eviction", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a file of requests, one JSON object a line")
    source.add_argument("--synthetic", choices=sorted(WORKLOADS), help="a made-up workload")
    parser.add_argument("--capacities", type=_capacities, help="blocks, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up workload")
    parser.add_argument("--half", choices=("first", "second", "whole"), default="whole")
    parser.add_argument("--policies", help="names, with commas between")
    options = parser.parse_args(arguments)
    try:
        requests = (
            read_trace(options.trace)
            if options.trace
            else WORKLOADS[options.synthetic](options.seed)
        )
        names = options.policies.split(",") if options.policies else EVERY_POLICY
        for name in names:
            new_policy(name)
    except KVTierError as error:
        print(error, file=sys.stderr)
        return 2
    half = len(requests) // 2
    if options.capacities:
        capacities = options.capacities
    elif options.trace:
        distinct = len({block for request in requests for block in request.blocks})
        capacities = tuple(max(1, int(distinct * share)) for share in SHARES)
    else:
        capacities = CAPACITIES
    if options.half == "first":
        requests = requests[:half]
    count_from = half if options.half == "second" else 0
    what = options.trace.name if options.trace else f"{options.synthetic} {options.seed}"
    report = Report(f"eviction: {what}, {options.half}")
    table = measure(requests, count_from, names, capacities, report)
    report.finish()
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
