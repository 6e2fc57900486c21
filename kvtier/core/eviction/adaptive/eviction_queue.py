"""The order in which runs have to go: the worst are queued, and ranked anew when these are used up.

To rank all runs at each eviction would take too long. So the queue holds the worst of them, and an
eviction takes their tails; a run that is used again leaves the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from kvtier.core.eviction.adaptive.prefix_runs import Runs
from kvtier.core.eviction.adaptive.reuse_forecast import Forecast
from kvtier.core.eviction.policy import UNKNOWN

_QUEUED_SHARE = 64
"""The worst 1/64 of what is ranked is queued; when that is used up, all is ranked again."""
_RANKED_MAX = 8192
"""At most so many runs are ranked at once, in turns: no request waits for more than that."""
_LOW_SHARE = 16
_SORTED_MAX = 256


class EvictionQueue:
    """The runs with the lowest rates of hits to come, worst first."""

    def __init__(self, runs: Runs, forecast: Forecast) -> None:
        self._runs = runs
        self._forecast = forecast
        self._queue: deque[int] = deque()
        self._ranked_to = 0

    def victims(self, count: int, pinned: Container[int], now: float) -> list[int]:
        """The next slots to go, which stay where they are."""
        if count <= 0:
            return []
        self._skip_unqueued()
        while True:
            found = self._first(count, pinned)
            if len(found) == count or not self._rank(count - len(found), now):
                return found

    def evict(self, count: int, pinned: Container[int], now: float) -> list[int]:
        """Cut the next slots to go off their runs."""
        runs = self._runs
        found: list[int] = []
        self._skip_unqueued()
        while len(found) < count:
            queued = (run for run in self._queue if runs.queued[run])
            found += runs.cut_tails(queued, count - len(found), pinned)
            if len(found) < count and not self._rank(count - len(found), now):
                break
        return found

    def _skip_unqueued(self) -> None:
        queue, queued = self._queue, self._runs.queued
        while queue and not queued[queue[0]]:
            queue.popleft()

    def _first(self, count: int, pinned: Container[int]) -> list[int]:
        """Up to `count` slots of the queued runs, in the order they have to go."""
        queued, tail, toward_head = self._runs.queued, self._runs.tail, self._runs.toward_head
        found: list[int] = []
        for run in self._queue:
            if not queued[run]:
                continue
            slot = tail[run]
            while slot != UNKNOWN:
                if slot not in pinned:
                    found.append(slot)
                    if len(found) == count:
                        return found
                slot = toward_head[slot]
        return found

    def _rank(self, wanted: int, now: float) -> bool:
        """Queue more runs, worst first, with at least `wanted` blocks; false if all are queued."""
        runs = self._runs
        queued = runs.queued
        self._queue = deque(filter(queued.__getitem__, self._queue))
        ranked = self._next_to_rank()
        if not len(ranked):
            return False
        worst = self._worst(ranked, wanted, now)
        self._queue.extend(worst)
        for run in worst:
            queued[run] = 1
        return True

    def _next_to_rank(self) -> NDArray[np.intp]:
        """All runs that are not queued, or of very many those whose turn it is, ascending."""
        runs, start = self._runs, self._ranked_to
        enough = _RANKED_MAX + 1
        turn = runs.unqueued(start, len(runs.queued), enough)
        first = runs.unqueued(0, start, enough - len(turn))
        if len(first) + len(turn) < enough:
            return np.concatenate([first, turn])
        turn = (turn if len(turn) else first)[:_RANKED_MAX]
        self._ranked_to = int(turn[-1]) + 1
        return turn

    def _worst(self, ranked: NDArray[np.intp], wanted: int, now: float) -> list[int]:
        """The first of these runs to go, in order: with so many blocks, or its share of all."""
        runs = self._runs
        blocks = runs.sizes().take(ranked)
        wanted = max(wanted, int(blocks.sum()) // _QUEUED_SHARE)
        used_at = runs.times().take(ranked)
        rates = self._forecast.rate(runs.kinds().take(ranked), now - used_at)
        if len(ranked) >= _SORTED_MAX:
            # To tell the low ones apart and sort only them is quicker than to sort all.
            few = len(ranked) // _LOW_SHARE
            low = (rates <= np.partition(rates, few)[few]).nonzero()[0]
            if blocks.take(low).sum() >= wanted:
                ranked, blocks = ranked.take(low), blocks.take(low)
                rates, used_at = rates.take(low), used_at.take(low)
        order = np.lexsort((-runs.depths().take(ranked), used_at, rates))
        needed = int(blocks.take(order).cumsum().searchsorted(wanted)) + 1
        worst: list[int] = ranked.take(order[:needed]).tolist()
        return worst
