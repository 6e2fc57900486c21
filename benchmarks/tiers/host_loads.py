"""A prompt's blocks out of CPU memory into an engine's KV tensors, beside plain copies of them.

    make bench-host-loads            JSON=result.json make bench-host-loads

All copy as many bytes out of a region into tensors, in turns. kvtier's copier proves each of them,
also those that two ranks have written, which it regroups for one; numpy and torch copy them as they
are, in one thread.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.measure import in_turns, median_ratio
from benchmarks.report import Report
from benchmarks.tiers.pages import LAYERS, PER_CHUNK, Pages, Slots, slots_of
from kvtier.types import BlockKey, block_key

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20}
PROMPT_BYTES = 64 << 20
HEADS, TOKEN_BYTES = 8, 512
MOST = 1.3
WARM_UP = 3

Begin = Callable[[Sequence[BlockKey], Sequence[int]], Callable[[], None]]


def head_sizes(payload: int) -> dict[str, int]:
    """How many bytes of a head lie together in vLLM's layouts: of a token, of all tokens."""
    of_page = payload // (LAYERS * PER_CHUNK) // HEADS
    return {"LBNHC": min(TOKEN_BYTES, of_page), "LBHNC": of_page}


def load(begin: Begin, keys: Sequence[BlockKey], slots: Slots, which: slice) -> None:
    """Copy some of the slots to pages, and wait for the end."""
    begin(keys[which], slots_of(slots.spec)[which])()


def measure(report: Report, label: str, payload: int, turns: int) -> None:
    """All contestants with blocks of one size; medians, and kvtier's ratios to the others."""
    count = PROMPT_BYTES // payload
    slots, pages = Slots(payload, 2 * count), Pages(payload, count)
    keys = [block_key(f"host{i}".encode()) for i in range(2 * count)]
    slots.seal(keys[count:], count, ranks=2)
    own, others = slice(0, count), slice(count, None)
    begin, copier = pages.copier(slots.handler.region, slots.namespace.digest)
    kvtier = partial(load, begin, keys, slots, own)
    contestants: dict[str, Callable[[], object]] = {
        "kvtier": kvtier,
        "numpy": lambda: pages.copy(slots.payloads[own]),
        "torch": pages.by_torch(slots.payloads[own]),
    }
    walls, cpus = taken = in_turns(contestants, turns, WARM_UP)
    label = f"{label} x {count}"
    for name in contestants:
        report.add(f"{label} {name}", taken.wall(name) * 1e3, "ms")
    for name in ("numpy", "torch"):
        ratio = median_ratio(walls["kvtier"], walls[name])
        report.at_most(f"{label} against {name}", ratio, "x", MOST)
        report.add(f"{label} CPU against {name}", median_ratio(cpus["kvtier"], cpus[name]), "x")
    for layout, head_bytes in head_sizes(payload).items():
        one = Pages(payload, count, (HEADS, head_bytes))
        begin_other, other = one.copier(slots.handler.region, slots.namespace.digest)
        regrouped = partial(load, begin_other, keys, slots, others)
        name = f"two ranks' {layout}"
        walls, _ = taken = in_turns({"kvtier": kvtier, name: regrouped}, turns, WARM_UP)
        other.close()
        report.add(f"{label} {name}", taken.wall(name) * 1e3, "ms")
        report.add(f"{label} rate of {name}", median_ratio(walls["kvtier"], walls[name]), "x")
    copier.close()
    slots.close()


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
