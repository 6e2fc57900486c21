"""How long requests wait: for the room that others' loads hold, and for their own loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvtier.core.costs.link_rates import GRACE_S
from kvtier.core.costs.model import CostModel

PATIENCE_S = 1.0
"""How long a request waits for room where it is not known how long its prompt takes to compute."""
_LATE = 2.0
"""A load that others hold up may take somewhat longer than expected; this one is late."""


class _Loading(NamedTuple):
    """A load from a lower tier, and what it was taken to spare."""

    since: float
    due: float
    start: int
    stop: int


class LoadDeadlines:
    """Knows since when each load is under way, and which of them is not worth waiting for any more.

    Nobody knows how long a load will still take that is late. Given up after as long as computing
    takes, it has cost twice that at most. That holds for an engine that has nothing to compute, and
    for one load at a time: where several are late, and the engine computes them all, the last would
    wait for the others longer than for its load. One that was expected to take longer than
    computing, because it spares others, has longer.
    """

    def __init__(
        self, costs: CostModel | None, clock: Callable[[], float], load_seconds: float
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._load_seconds = load_seconds
        self._loads: dict[int, _Loading] = {}
        self._given_up: set[int] = set()
        self._next = 0.0
        """When another may be given up, though the last has not ended yet."""

    def for_room(self, since: float, start: int, stop: int) -> bool:
        """Whether a request that waits since then had better wait on, because there will be room
        for its load, and soon. It waits no longer than tokens `start:stop` take to compute, or a
        load may take where that spares others as much, and not at all for slow loads."""
        waited = self._clock() - since
        computing = self._costs.recompute_seconds(start, stop) if self._costs else None
        if self._costs is None or computing is None:
            return waited < PATIENCE_S
        spared = min(self._costs.spared_seconds(start, stop), self._load_seconds)
        return waited < max(computing, spared) and self._costs.drain_seconds() < computing / 2

    def began(self, number: int, due: float, start: int, stop: int) -> None:
        """A load began without which the engine has to compute tokens `start:stop`; it is expected
        to end when it is `due`."""
        self._loads[number] = _Loading(self._clock(), due, start, stop)

    def ended(self, number: int) -> bool:
        """It has ended; whether because it was given up."""
        self._loads.pop(number, None)
        if number not in self._given_up:
            return False
        self._given_up.remove(number)
        self._next = 0.0  # its prompt is computed from now on
        return True

    def give_up(self) -> int | None:
        """The engine has nothing to compute: the load that it had better not wait for any longer,
        if there is one."""
        now = self._clock()
        if self._costs is None or now < self._next:
            return None
        for number, (since, due, start, stop) in self._loads.items():
            computing = self._costs.recompute_seconds(start, stop)
            if computing is None or number in self._given_up:
                continue
            if now - since > max(computing, _LATE * (due - since)) + GRACE_S:
                self._given_up.add(number)
                self._next = now + computing
                return number
        return None
