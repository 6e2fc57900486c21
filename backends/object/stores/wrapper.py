"""Stores that wrap another: their base, one that is only read, and one that can be revoked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from kvtier.backends.object.stores.errors import StoreError, TimedOut
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome, Store

_T = TypeVar("_T")


class WrappedStore(Store):
    """Passes all calls on, those that return something at once through `_call`."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def _call(self, call: Callable[[float | None], _T], deadline: float | None) -> _T:
        """Make a call of the inner store, which takes a deadline."""
        return call(deadline)

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after=after, deadline=deadline)

    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        return self._call(
            lambda end: self._inner.put(name, buffers, if_absent=if_absent, deadline=end), deadline
        )

    def get(
        self,
        name: str,
        into: Buffer,
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> int | None:
        return self._call(
            lambda end: self._inner.get(name, into, offset=offset, deadline=end), deadline
        )

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        return self._call(lambda end: self._inner.head(name, deadline=end), deadline)

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        """In batches, each with the time of one call: a million names take minutes."""
        failed: dict[str, StoreError] = {}
        left = iter(names)
        while batch := list(islice(left, self.deletes_at_once)):
            failed.update(self._delete(batch, deadline))
        return failed

    def _delete(self, names: Sequence[str], deadline: float | None) -> Mapping[str, StoreError]:
        return self._call(lambda end: self._inner.delete(names, deadline=end), deadline)

    @property
    def deletes_at_once(self) -> int:
        return self._inner.deletes_at_once

    def sweep(self, older_than_s: float) -> Iterator[int]:
        return self._inner.sweep(older_than_s)

    def close(self) -> None:
        self._inner.close()


class ReadOnlyStore(WrappedStore):
    """Reports success for every write, and leaves the store as it is."""

    def __repr__(self) -> str:
        return f"ReadOnlyStore({self._inner!r})"

    def put(self, *_: object, **__: object) -> PutOutcome:
        return PutOutcome.STORED

    def delete(self, *_: object, **__: object) -> Mapping[str, StoreError]:
        return {}

    def sweep(self, older_than_s: float) -> Iterator[int]:
        return iter(())


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
