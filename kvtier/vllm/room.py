"""Requests for whose loads host memory has no room now, and will have: they are told to ask again.

vLLM does so in each step, for all keys of each of them, and there may be hundreds. As long as there
is no more room than when one was told to wait, nobody need look for its blocks once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.core.promises import Promises
from kvtier.vllm.crowd import Crowd
from kvtier.vllm.patience import Patience
from kvtier.vllm.requests import RequestState, Shortage


class Room:
    """Knows what is spare, and whether it is worth waiting for more."""

    def __init__(
        self, promises: Promises, patience: Patience, crowd: Crowd, clock: Callable[[], float]
    ) -> None:
        self._promises = promises
        self._patience = patience
        self._crowd = crowd
        self._clock = clock

    def spare(self) -> list[int]:
        """What can still be promised in this step."""
        return self._promises.spare()

    def awaits(self, request: str, state: RequestState, end: int, spare: Sequence[int]) -> bool:
        """Whether a request, of whose prompt up to `end` not all could be promised though so much
        was spare, had better wait: there will be more room soon."""
        if state.waits_since is None:
            state.waits_since = self._clock()
        pairs = zip(spare, self.spare(), strict=True)
        taken = [max(0, before - left) for before, left in pairs]
        state.shortage = Shortage(state.start, state.limit, min(state.limit, end), spare, taken)
        return self._waits(request, state)

    def still_awaits(self, request: str, state: RequestState) -> bool:
        """Whether it would be told so again: it asks for the same, and nothing was set free."""
        short = state.shortage
        if short is None or (short.start, short.limit) != (state.start, state.limit):
            return False
        if any(now > then for now, then in zip(self.spare(), short.spare, strict=True)):
            return False
        waits = self._waits(request, state)
        if waits:
            self._promises.withhold(short.taken)
        return waits

    def _waits(self, request: str, state: RequestState) -> bool:
        since, short = state.waits_since, state.shortage
        if since is None or short is None:
            return False
        waits = self._patience.for_room(since, short.start, short.end)
        if waits:
            self._crowd.told_to_wait(request)
        return waits
