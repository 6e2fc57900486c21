"""Requests for whose loads host memory has no room now, and will have: they are told to ask again.

vLLM does so in each step, for all keys of each of them, and there may be hundreds. As long as there
is no more room than when one was told to wait, nobody need look for its blocks once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvtier.core.chain.loads.promises import Promises
from kvtier.core.costs.chunk_spans import Shape
from kvtier.vllm.scheduler.load_deadlines import LoadDeadlines
from kvtier.vllm.scheduler.request_state import Joined, RequestState, Shortage
from kvtier.vllm.scheduler.waiting_requests import WaitingRequests


class Room:
    """Knows whether it is worth waiting for more of it."""

    def __init__(
        self,
        promises: Promises,
        patience: LoadDeadlines,
        crowd: WaitingRequests,
        clock: Callable[[], float],
    ) -> None:
        self._promises = promises
        self._patience = patience
        self._crowd = crowd
        self._clock = clock

    def awaits(self, request: str, state: RequestState, end: int) -> bool:
        """Whether a request, of whose prompt up to `end` not all could be promised, had better
        wait: there will be more room soon."""
        if state.waits_since is None:
            state.waits_since = self._clock()
        end, taken = min(state.limit, end), self._taken(state.spare)
        state.shortage = Shortage(state.asked, end, state.spare, taken)
        return self._waits(request, state.waits_since, state.start, end)

    def still_awaits(self, request: str, state: RequestState) -> bool:
        """Whether it would be told so again: it asks for the same, and nothing was set free."""
        since, short = state.waits_since, state.shortage
        if since is None or short is None or short.asked != state.asked:
            return False
        if any(now > then for now, then in zip(self._promises.spare(), short.spare, strict=True)):
            return False
        waits = self._waits(request, since, state.start, short.end)
        if waits:
            self._promises.withhold(short.taken)
        return waits

    def _waits(self, request: str, since: float, start: int, end: int) -> bool:
        waits = self._patience.for_room(since, start, end)
        if waits:
            self._crowd.told_to_wait(request)
        return waits

    def joins(
        self, state: RequestState, shapes: Mapping[int, Shape], loading: Collection[bytes]
    ) -> None:
        """vLLM puts off a request with hits: for one of the blocks that are being loaded."""
        key = state.shared(shapes, loading)
        if key is not None:
            state.joined = Joined(state.asked, key, self._taken(state.spare))

    def still_joins(self, state: RequestState, loading: Collection[bytes]) -> bool:
        """Whether it will be put off again: it asks for the same, and that block is not here."""
        joined = state.joined
        if joined is None or joined.key not in loading or joined.asked != state.asked:
            return False
        self._promises.withhold(joined.taken)
        return True

    def _taken(self, spare: Sequence[int]) -> list[int]:
        """How much was promised since so much was spare."""
        pairs = zip(spare, self._promises.spare(), strict=True)
        return [max(0, before - left) for before, left in pairs]
