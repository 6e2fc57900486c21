"""Whether what a process holds grows: a line by least squares, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
