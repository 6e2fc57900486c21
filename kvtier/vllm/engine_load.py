"""What the engine has to do, and how fast it does it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from kvtier.cost.model import CostModel
from kvtier.vllm.requests import Requests

# How fast the engine computes prompts, read off the times between its scheduler's steps.

_AHEAD_MAX = 8
"""More steps are never under way; if it looks so, some have ended without a word."""
_LONG = 1.5
"""A step that seems to have taken so many times as long as expected may have had word of its end
late."""
_TOGETHER = 8
"""So many at most."""
_FOLLOWS = 1.1
"""By how much each step without prompts moves what such steps are expected to take."""
_PROMPT_TOKENS_MIN = 32
_UNTOLD_MAX = 10_000


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


class _Steps(NamedTuple):
    """Steps that are told of together."""

    number: int = 0
    seconds: float = 0.0
    tokens: int = 0
    middles: float = 0.0
    """The sum of where each of the tokens stands."""

    def and_one(self, seconds: float, tokens: int, context: int) -> _Steps:
        middles = self.middles + tokens * (context + tokens / 2)
        return _Steps(self.number + 1, self.seconds + seconds, self.tokens + tokens, middles)


class StepTimes:
    """Tells the cost model of every step that computed prompts. On the scheduler's thread.

    With steps scheduled ahead, word of a step's end may be late: the engine's thread was launching
    the next one, which the device was computing by then. So the first seems long and the next one
    short. Their sum is right: while steps seem much longer than expected, and another one is under
    way, they are told of together with that.
    """

    def __init__(
        self, costs: CostModel | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._ended = 0.0
        self._held = _Steps()
        self._without = 0.001
        """How long steps without prompts take, as a rule."""

    def began(self, tokens: int, context: int) -> None:
        """A step was scheduled that computes so many prompt tokens after so many others."""
        if len(self._steps) >= _AHEAD_MAX:
            # No step that began ends any more.
            self._steps.clear()
            self._held = _Steps()
        self._steps.append(_Step(self._clock(), tokens, context))

    def ended(self) -> None:
        """The oldest step is complete. With steps scheduled ahead, it began when the last ended."""
        if not self._steps:
            return
        (began, tokens, context), now = self._steps.popleft(), self._clock()
        seconds, usual = now - max(began, self._ended), self._usual(tokens, context)
        steps = self._held.and_one(seconds, tokens, context)
        self._ended, self._held = now, _Steps()
        if not tokens:
            self._without *= _FOLLOWS if seconds > self._without else 1 / _FOLLOWS
        if self._steps and steps.number < _TOGETHER and seconds > _LONG * usual:
            self._held = steps
        elif steps.tokens and self._costs is not None:
            middle = steps.middles / steps.tokens
            context = int(middle - steps.tokens / 2)
            self._costs.observe_prefill(steps.tokens, steps.seconds, context)

    def _usual(self, tokens: int, context: int) -> float:
        """How long such a step is expected to take."""
        if not tokens or self._costs is None:
            return self._without
        computing = self._costs.recompute_seconds(context, context + tokens)
        return math.inf if computing is None else self._without + computing

    def under_way(self) -> float:
        """How long the device is still at the steps that have begun."""
        if not self._steps:
            return 0.0
        left = sum(self._usual(step.tokens, step.context) for step in self._steps)
        done = self._clock() - max(self._steps[0].began, self._ended)
        return max(0.0, left - done) if left < math.inf else 0.0


class FirstToken(NamedTuple):
    """How long a request waited for its first token, and how its prompt was got."""

    prompt: str
    seconds: float
    tokens: int


class _Prompt(msgspec.Struct):
    added: float
    got: str = "computed"
    stop: int = 0


class FirstTokens:
    """Times each request from when it was added to the end of the step that completes its prompt.

    A prompt is `loaded` if something of it came from a tier, `engine` if the engine itself had some
    of it and no tier was asked, and `computed` else. On the scheduler's thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prompts: dict[str, _Prompt] = {}
        self._completed: deque[list[_Prompt]] = deque()
        """By step, those of the steps that have begun."""
        self._samples: deque[FirstToken] = deque(maxlen=_UNTOLD_MAX)

    def added(self, request: str) -> None:
        """It comes into the engine's queue."""
        self._prompts[request] = _Prompt(self._clock())

    def loads(self, request: str) -> None:
        """Some of it comes from a tier."""
        if (prompt := self._prompts.get(request)) is not None:
            prompt.got = "loaded"

    def admitted(self, request: str, start: int, stop: int) -> None:
        """Tokens `start:stop` of it will be computed."""
        prompt = self._prompts.get(request)
        if prompt is not None and stop > start:
            prompt.stop = stop
            if start and prompt.got != "loaded":
                prompt.got = "engine"

    def began(self, completed: Collection[str]) -> None:
        """A step begins that computes these prompts to their ends."""
        if len(self._completed) >= _AHEAD_MAX:
            self._completed.clear()
        found = (self._prompts.pop(request, None) for request in completed)
        self._completed.append([prompt for prompt in found if prompt is not None])

    def ended(self) -> None:
        """The oldest step is complete."""
        now = self._clock()
        for each in self._completed.popleft() if self._completed else ():
            self._samples.append(FirstToken(each.got, now - each.added, each.stop))

    def gone(self, request: str) -> None:
        """It ends, perhaps without a token."""
        self._prompts.pop(request, None)

    def take(self) -> list[FirstToken]:
        """Those since the last call."""
        found = [*self._samples]
        self._samples.clear()
        return found


class EngineLoad:
    """Knows who waits for the engine, the prompts that it has begun, or is about to, and what is
    left of each; and tells the cost model, which asks before each decision.

    vLLM asks about a request only when all that runs has got its tokens of the step, so this is
    what the device is at, what is left of the prompts in the step, and nothing else. A request
    whose load is under way is no part of it: it is admitted once more when that has ended.
    """

    def __init__(
        self,
        requests: Requests,
        costs: CostModel | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._costs = costs
        self.pace = StepTimes(costs, clock)
        self.first_tokens = FirstTokens(clock)
        self._left: dict[str, tuple[int, int]] = {}
        self._seconds: float | None = 0.0
        """How long all of that takes to compute; None if it is to be reckoned anew."""

    def admitted(self, request: str, start: int, stop: int) -> None:
        """The engine will compute tokens `start:stop` of a request from this step on."""
        if stop > start:
            self._left[request], self._seconds = (start, stop), None
            self.first_tokens.admitted(request, start, stop)

    def stepped(self, each: Mapping[str, int]) -> None:
        """A step begins that computes so many tokens of each."""
        self._requests.stepped()
        completed = []
        for request, (start, stop) in list(self._left.items()):
            self._left[request], self._seconds = (start + each.get(request, 0), stop), None
            if self._left[request][0] >= stop:
                del self._left[request]
                completed.append(request)
        self.first_tokens.began(completed)

    def ended(self) -> None:
        """The oldest step is complete."""
        self.pace.ended()
        self.first_tokens.ended()

    def gone(self, request: str) -> None:
        """It has ended."""
        self.first_tokens.gone(request)
        if self._left.pop(request, None) is not None:
            self._seconds = None

    def tell(self) -> None:
        """Tell the cost model, which is about to be asked."""
        if self._costs is None:
            return
        if self._seconds is None:
            times = (self._costs.recompute_seconds(*each) for each in self._left.values())
            self._seconds = sum(seconds or 0.0 for seconds in times)
        self._costs.observe_waiting(self._requests.behind)
        self._costs.observe_queue(self.pace.under_way(), self._seconds)
