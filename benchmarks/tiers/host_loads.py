"""A prompt's blocks out of CPU memory into an engine's KV tensors, beside plain copies of them.

    make bench-host-loads            JSON=result.json make bench-host-loads

All copy the same bytes out of the same region into the same tensors, in turns. kvtier's copier
proves each of them, numpy and torch copy them as they are, in one thread.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

from benchmarks.measure import in_turns, median_ratio
from benchmarks.report import Report
from benchmarks.tiers.pages import Pages, Slots, slots_of
from kvtier.types import block_key

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20}
PROMPT_BYTES = 64 << 20
MOST = 1.3
WARM_UP = 3


def measure(report: Report, label: str, payload: int, turns: int) -> None:
    """All contestants with blocks of one size; medians, and kvtier's ratios to the others."""
    count = PROMPT_BYTES // payload
    slots, pages = Slots(payload, count), Pages(payload, count)
    keys = [block_key(f"host{i}".encode()) for i in range(count)]
    begin, copier = pages.copier(slots.handler.region, slots.namespace.digest)
    contestants: dict[str, Callable[[], object]] = {
        "kvtier": lambda: begin(keys, slots_of(slots.spec))(),
        "numpy": lambda: pages.copy(slots.payloads),
        "torch": pages.by_torch(slots.payloads),
    }
    walls, cpus = taken = in_turns(contestants, turns, WARM_UP)
    copier.close()
    slots.close()
    label = f"{label} x {count}"
    for name in contestants:
        report.add(f"{label} {name}", taken.wall(name) * 1e3, "ms")
    for name in ("numpy", "torch"):
        ratio = median_ratio(walls["kvtier"], walls[name])
        report.at_most(f"{label} against {name}", ratio, "x", MOST)
        report.add(f"{label} CPU against {name}", median_ratio(cpus["kvtier"], cpus[name]), "x")


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
