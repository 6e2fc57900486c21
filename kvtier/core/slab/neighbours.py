"""Which free slots the blocks of one store get: neighbours are moved by one call."""

from __future__ import annotations

from collections import deque

from kvtier.core.slab.layout import runs

_LOOKED_AT = 256
"""Among so many free slots neighbours are looked for, or four times as many as are taken."""
_MORE_MAX = 512


def take_neighbours(free: deque[int], count: int) -> list[int]:
    """Take so many slots, those in the longest runs of the next ones that are free; ascending. What
    has been free for longest comes next."""
    next_ones = [free.popleft() for _ in range(count)]
    first = sorted(next_ones)
    if (
        not first or first[-1] - first[0] < count
    ):  # mostly: a new slab, or a prompt that was evicted
        return first
    look = min(len(free), max(_LOOKED_AT, 4 * count) - count, _MORE_MAX)
    next_ones += [free.popleft() for _ in range(look)]
    ordered = sorted(next_ones)
    taken: list[int] = []
    for start, stop in sorted(runs(ordered), key=lambda run: run[0] - run[1]):
        taken += ordered[start : min(stop, start + count - len(taken))]
        if len(taken) == count:
            break
    chosen = set(taken)
    free.extendleft(slot for slot in reversed(next_ones) if slot not in chosen)
    return sorted(taken)
