"""What processes hold, and whether it grows: a line by least squares, with its standard error."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from campaign.round import Round

_ERRORS = 4.0


def judge(
    round: Round,
    looks: Sequence[Mapping[str, float]],
    flat: Mapping[str, float],
    of: str,
    since: int = 0,
) -> None:
    """Find what grows over the second half of the looks, and not before so many of what counts as
    `of`: by more in a thousand than `flat` allows, and more than the line's error explains."""
    half = [each for each in looks[len(looks) // 2 :] if each[of] >= since]
    for what, most in flat.items():
        more, error = slope([(each[of] / 1000, float(each[what])) for each in half])
        round.notes.append(f"{what}: {more:+.3g} ± {error:.2g} in 1000 {of}")
        grows = more > most and more > _ERRORS * error
        round.check(not grows, f"{what} grows by {more:.3g} ± {error:.2g} in 1000 {of}")


def slope(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """By least squares, with its standard error."""
    if len(pairs) < 3:
        return 0.0, math.inf
    middle = sum(x for x, _ in pairs) / len(pairs)
    level = sum(y for _, y in pairs) / len(pairs)
    spread = sum((x - middle) ** 2 for x, _ in pairs)
    found = sum((x - middle) * (y - level) for x, y in pairs) / spread
    left = sum((y - level - found * (x - middle)) ** 2 for x, y in pairs)
    return found, math.sqrt(left / (len(pairs) - 2) / spread)


def held(engine: int, mover: int | None, memory: Path) -> dict[str, int]:
    """What an engine and its mover hold, and what lies in a folder in shared memory."""
    processes = [pid for pid in (engine, mover) if pid is not None]
    files = (path.stat() for path in memory.rglob("*") if path.is_file())
    return {
        "descriptors": sum(_count(pid, "fd") for pid in processes),
        "threads": sum(_count(pid, "task") for pid in processes),
        "memory": _own_memory(engine),
        "mover's memory": _own_memory(processes[-1]),
        "shared memory": sum(status.st_blocks * 512 for status in files),
    }


def _count(process: int, what: str) -> int:
    return sum(1 for _ in Path(f"/proc/{process}/{what}").iterdir())


def _own_memory(process: int) -> int:
    _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
