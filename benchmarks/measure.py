"""What benchmarks measure by: contestants in turns, ratios of neighbouring turns, and memory."""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Taken(NamedTuple):
    """Seconds of each contestant, turn by turn: by the clock, and of the processor."""

    walls: dict[str, list[float]]
    cpus: dict[str, list[float]]

    def wall(self, name: str) -> float:
        """Median."""
        return median(self.walls[name])

    def cpu(self, name: str) -> float:
        """Median."""
        return median(self.cpus[name])


def rotated(contestants: Iterable[T], turn: int) -> list[T]:
    """All of them; another one is the first in each turn."""
    every = list(contestants)
    first = turn % len(every)
    return every[first:] + every[:first]


def in_turns(
    contestants: Mapping[str, Callable[[], object]], turns: int, warm_up: int = 1
) -> Taken:
    """Run all of them in every turn, beginning with another one each time; the first turns warm up
    and do not count."""
    taken = Taken(defaultdict(list), defaultdict(list))
    for turn in range(turns + warm_up):
        for name in rotated(contestants, turn):
            cpu, wall = time.process_time(), time.perf_counter()
            contestants[name]()
            if turn >= warm_up:
                taken.walls[name].append(time.perf_counter() - wall)
                taken.cpus[name].append(time.process_time() - cpu)
    return taken


def median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of each turn's own ratio."""
    return median(itertools.starmap(float.__truediv__, zip(mine, theirs, strict=True)))


def memory(what: str, pid: int | str = "self") -> int:
    """Bytes that a process has of its own (RssAnon) or in all (VmRSS), or that it had at most
    (VmHWM), as Linux says; none if it has ended."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{what}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
