"""How fast the engine computes prompts, read off the times between its scheduler's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvtier.core.costs.model import CostModel

_AHEAD_MAX = 8
"""More steps are never under way; if it looks so, some have ended without a word."""


_PROMPT_TOKENS_MIN = 32


def prompt_tokens(scheduled: Any) -> tuple[int, int]:
    """The prompt tokens that a step of vLLM's computes, and how many stand before them on average.

    Requests with a few tokens are decoding (speculatively, if more than one).
    """
    counts: Mapping[str, int] = scheduled.num_scheduled_tokens
    if scheduled.total_num_scheduled_tokens < len(counts) + _PROMPT_TOKENS_MIN:
        return 0, 0
    cached = scheduled.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update({new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs})
    prompts = {name: count for name, count in counts.items() if count >= _PROMPT_TOKENS_MIN}
    tokens = sum(prompts.values())
    if not tokens:
        return 0, 0
    middles = sum(count * (before.get(name, 0) + count / 2) for name, count in prompts.items())
    return tokens, int(middles / tokens - tokens / 2)


class _Step(NamedTuple):
    began: float
    tokens: int
    context: int


class Pace:
    """Tells the cost model of every step that computed prompts. On the scheduler's thread."""

    def __init__(
        self, costs: CostModel | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._ended = 0.0

    def began(self, tokens: int, context: int) -> None:
        """A step was scheduled that computes so many prompt tokens after so many others."""
        if len(self._steps) >= _AHEAD_MAX:
            self._steps.clear()
        self._steps.append(_Step(self._clock(), tokens, context))

    def lost(self) -> None:
        """No step that began ends any more."""
        self._steps.clear()

    def ended(self) -> None:
        """The oldest step is complete. With steps scheduled ahead, it began when the last ended."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), self._clock()
        if self._costs is not None:
            seconds = now - max(step.began, self._ended)
            self._costs.observe_prefill(step.tokens, seconds, step.context)
        self._ended = now
