"""A store that can be taken away from whoever uses it at this moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvtier.backends.object.stores.errors import TimedOut
from kvtier.backends.object.stores.store import ObjectInfo, Store
from kvtier.backends.object.stores.wrapper import WrappedStore

_T = TypeVar("_T")


class RevocableStore(WrappedStore):
    """Passes calls on until a time, and lets none take longer."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._until = math.inf

    def __repr__(self) -> str:
        return f"Leash({self._inner!r})"

    def pull(self, until: float = -math.inf) -> None:
        """From now on no call goes beyond this time (of `time.monotonic`), and none begins after
        it: who is in the midst of something ends with the call that is under way."""
        self._until = until

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        for info in self._inner.list(prefix, after=after, deadline=self._end(deadline)):
            if self._until != math.inf:
                self._end(deadline)
            yield info

    def _call(self, call: Callable[[float | None], _T], deadline: float | None) -> _T:
        return call(self._end(deadline))

    def _end(self, deadline: float | None) -> float | None:
        if self._until == math.inf:
            return deadline
        if time.monotonic() >= self._until:
            raise TimedOut("there was no time left for the store")
        return self._until if deadline is None else min(deadline, self._until)
