"""A store that can be revoked while other threads use it."""

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
    """Passes calls on until a time, and gives none a later deadline."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._until = math.inf

    def __repr__(self) -> str:
        return f"RevocableStore({self._inner!r})"

    def revoke(self, from_s: float = -math.inf) -> None:
        """From this time on (of `time.monotonic`) no call begins. Every call that begins before
        has it as its deadline; a listing ends with the page that is under way."""
        self._until = from_s

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        for info in self._inner.list(prefix, after=after, deadline=self._bound(deadline)):
            if self._until != math.inf:
                self._bound(deadline)
            yield info

    def _call(self, call: Callable[[float | None], _T], deadline: float | None) -> _T:
        return call(self._bound(deadline))

    def _bound(self, deadline: float | None) -> float | None:
        if self._until == math.inf:
            return deadline
        if time.monotonic() >= self._until:
            raise TimedOut("there was no time left for the store")
        return self._until if deadline is None else min(deadline, self._until)
