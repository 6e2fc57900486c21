"""Who waits for the engine's time, as far as one can tell from what vLLM asks."""

from __future__ import annotations

from collections import deque

_REMEMBERED = 8


class Crowd:
    """Counts the requests that were added and have not been asked about yet.

    vLLM asks about a request when it is about to schedule it. Those that a whole step leaves
    waiting have come when the engine had more to compute than it could. Unless it was short of
    blocks: then it asks about a request, cannot schedule it, and asks again in the next step. A
    load holds blocks for as long as it takes, so it spares none of these.
    """

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._asked: dict[str, bool] = {}
        """Requests that were asked about and not scheduled yet; whether for want of blocks."""
        self._told: set[str] = set()
        self._short: deque[bool] = deque(maxlen=_REMEMBERED)
        self._left = 0

    def came(self, request: str) -> None:
        """A request was added."""
        self._waiting.add(request)

    def asked(self, request: str) -> None:
        """The engine wants to schedule this one."""
        self._waiting.discard(request)
        self._told.discard(request)
        self._asked[request] = request in self._asked

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
        short = self._asked.pop(request, None)
        if short is not None:
            self._short.append(short)

    def gone(self, request: str) -> None:
        """It has ended."""
        self._waiting.discard(request)
        self._asked.pop(request, None)
        self._told.discard(request)

    def stepped(self) -> None:
        """All that the engine does in this step is settled."""
        self._left = len(self._waiting)

    @property
    def behind(self) -> int:
        """How many wait for the engine's time behind the one that it asks about now."""
        if any(self._short) or any(self._asked.values()):
            return 0
        return min(self._left, len(self._waiting)) + len(self._told)
