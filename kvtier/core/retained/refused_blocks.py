"""Blocks that sessions would retain, if there were places: others that let go of them do not make
them go first. A system prompt that all sessions have is used on when one of them is over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from kvtier.types import BlockKey


class RefusedBlocks:
    """By session, until the same time for all that it was refused: so much need not be exact."""

    def __init__(self, blocks: int, sessions: int, clock: Callable[[], float]) -> None:
        """Knows at most so many of both; what comes then is not noted."""
        self._blocks_max = blocks
        self._sessions_max = sessions
        self._clock = clock
        self._sessions: dict[str, dict[BlockKey, None]] = {}
        self._ends: dict[str, float] = {}
        self._asked: Counter[BlockKey] = Counter()
        self._next_end = math.inf

    def __contains__(self, key: object) -> bool:
        return key in self._asked

    def __len__(self) -> int:
        return len(self._asked)

    def note(self, session: str, keys: Iterable[BlockKey], until: float) -> None:
        """A session was refused these, which it would need until then."""
        if session not in self._sessions and len(self._sessions) >= self._sessions_max:
            return
        mine = self._sessions.setdefault(session, {})
        for key in keys:
            if key not in mine:
                if key not in self._asked and len(self._asked) >= self._blocks_max:
                    break
                mine[key] = None
                self._asked[key] += 1
        if mine:
            self._ends[session] = until
            self._next_end = min(self._next_end, until)
        else:
            del self._sessions[session]

    def forget(self, session: str, keys: Iterable[BlockKey] | None = None) -> None:
        """A session has got these (None: whatever it was refused), or does not need them."""
        mine = self._sessions.get(session)
        if mine is None:
            return
        for key in list(mine) if keys is None else keys:
            if key in mine:
                del mine[key]
                self._asked[key] -= 1
                if not self._asked[key]:
                    del self._asked[key]
        if not mine:
            del self._sessions[session], self._ends[session]

    def expire(self) -> None:
        """Forget what nobody would retain any more."""
        now = self._clock()
        if now < self._next_end:
            return
        for session in [name for name, until in self._ends.items() if until <= now]:
            self.forget(session)
        self._next_end = min(self._ends.values(), default=math.inf)

    def clear(self) -> None:
        """Forget all."""
        self._sessions.clear()
        self._ends.clear()
        self._asked.clear()
        self._next_end = math.inf
