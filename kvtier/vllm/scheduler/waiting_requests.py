"""Who waits for the engine's time, as far as one can tell from what vLLM asks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_REMEMBERED = 8


class _Question(NamedTuple):
    """What is known of a request that was asked about and not scheduled yet."""

    scarce: bool
    """The engine might have lacked the blocks for it."""
    short: bool
    """It was not scheduled at once, and that may have been why."""


class WaitingRequests:
    """Counts the requests that were added and have not been asked about yet.

    vLLM asks about a request when it is about to schedule it. Those that a whole step leaves
    waiting have come when the engine had more to compute than it could. Unless it was short of
    blocks: then it asks about a request, cannot schedule it, and asks again in the next step. A
    load holds blocks for as long as it takes, so it spares none of these. (Where there are blocks
    enough, something else stood in the way: what was left of a step was too little to begin with.)
    """

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._asked: dict[str, _Question] = {}
        self._told: set[str] = set()
        self._short: deque[bool] = deque(maxlen=_REMEMBERED)
        self._left = 0

    def came(self, request: str) -> None:
        """A request was added."""
        self._waiting.add(request)

    def asked(self, request: str, scarce: bool = True) -> None:
        """The engine wants to schedule this one; `scarce` if it may lack the blocks."""
        self._waiting.discard(request)
        self._told.discard(request)
        before = self._asked.get(request)
        short = before is not None and (before.short or before.scarce)
        self._asked[request] = _Question(scarce, short)

    def put_off(self, request: str) -> None:
        """It is asked about again, and not for want of blocks: another's load brings what it needs,
        or copies of its own are under way."""
        self._asked.pop(request, None)

    def told_to_wait(self, request: str) -> None:
        """It is put off for want of room that others' loads hold."""
        self.put_off(request)
        self._told.add(request)

    def scheduled(self, request: str) -> None:
        """It has its blocks now."""
        question = self._asked.pop(request, None)
        if question is not None:
            self._short.append(question.short)

    def gone(self, request: str) -> None:
        """It has ended."""
        self._waiting.discard(request)
        self._asked.pop(request, None)
        self._told.discard(request)

    def stepped(self) -> None:
        """All that the engine does in this step is settled."""
        self._left = len(self._waiting)

    @property
    def anybody(self) -> bool:
        """Whether anybody waits for the engine, be it for its time or for its blocks."""
        return bool(self._waiting or self._asked or self._told)

    @property
    def short_of_room(self) -> bool:
        """Whether somebody is put off for want of room that others' loads hold."""
        return bool(self._told)

    @property
    def behind(self) -> int:
        """How many wait for the engine's time behind the one that it asks about now."""
        if any(self._short) or any(question.short for question in self._asked.values()):
            return 0
        return min(self._left, len(self._waiting)) + len(self._told)
