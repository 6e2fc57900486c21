"""How fast the engine computes prompts, read off the times between its scheduler's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvtier.core.costs import CostModel

_AHEAD_MAX = 8
"""More steps are never under way; if it looks so, some have ended without a word."""


class _Step(NamedTuple):
    began: float
    tokens: int
    context: int


class Pace:
    """Tells the cost model of every step that computed prompts. On the scheduler's thread."""

    def __init__(self, costs: CostModel, clock: Callable[[], float] = time.monotonic) -> None:
        self._costs = costs
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._ended = 0.0

    def began(self, tokens: int, context: int) -> None:
        """A step was scheduled that computes so many prompt tokens after so many others."""
        if len(self._steps) >= _AHEAD_MAX:
            self._steps.clear()
        self._steps.append(_Step(self._clock(), tokens, context))

    def ended(self) -> None:
        """The oldest step is complete. With steps scheduled ahead, it began when the last ended."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        self._costs.observe_prefill(step.tokens, now - max(step.began, self._ended), step.context)
        self._ended = now
