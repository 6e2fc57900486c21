"""What the engine has to compute before it comes to the request that it asks about."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.core.costs.model import CostModel
from kvtier.vllm.scheduler.prefill_pace import Pace


class Backlog:
    """Knows the prompts that the engine has begun, or is about to, and what is left of each.

    vLLM asks about a request only when all that runs has got its tokens of the step, so this is
    what the device is at, what is left of the prompts in the step, and nothing else. A request
    whose load is under way is no part of it: it is admitted once more when that has ended.
    """

    def __init__(self, costs: CostModel | None, pace: Pace) -> None:
        self._costs = costs
        self._pace = pace
        self._left: dict[str, tuple[int, int]] = {}
        self._seconds: float | None = 0.0
        """How long all of that takes to compute; None if it is to be reckoned anew."""

    def admitted(self, request: str, start: int, stop: int) -> None:
        """The engine will compute tokens `start:stop` of a request from this step on."""
        if stop > start:
            self._left[request], self._seconds = (start, stop), None

    def stepped(self, scheduled: Mapping[str, int]) -> None:
        """A step begins that computes so many tokens of each."""
        for request, (start, stop) in list(self._left.items()):
            self.gone(request)
            self.admitted(request, start + scheduled.get(request, 0), stop)

    def gone(self, request: str) -> None:
        """It has ended."""
        if self._left.pop(request, None) is not None:
            self._seconds = None

    def tell(self) -> None:
        """Tell the cost model, which is about to be asked."""
        if self._costs is None:
            return
        if self._seconds is None:
            times = (self._costs.recompute_seconds(*each) for each in self._left.values())
            self._seconds = sum(seconds or 0.0 for seconds in times)
        self._costs.observe_queue(self._pace.under_way(), self._seconds)
