"""Stores that wrap another: their base, and a keeper's, which can be revoked or is only read."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvtier.backends.object.stores.errors import StoreError, TimedOut
from kvtier.backends.object.stores.store import (
    DELETES_MAX,
    Buffers,
    Deadline,
    ObjectInfo,
    PutOutcome,
    Store,
)

_T = TypeVar("_T")


class WrappedStore(Store):
    """Passes all calls on, those that return something at once through `_call`."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def _call(self, call: Callable[[float | None], _T], deadline: Deadline) -> _T:
        """Make a call of the inner store, which takes a deadline."""
        return call(deadline)

    def list(
        self, prefix: str = "", *, after: str = "", deadline: Deadline = None
    ) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after=after, deadline=deadline)

    def put(
        self, name: str, buffers: Buffers, *, if_absent: bool = False, deadline: Deadline = None
    ) -> PutOutcome:
        return self._call(
            lambda end: self._inner.put(name, buffers, if_absent=if_absent, deadline=end), deadline
        )

    def get(
        self, name: str, into: Buffers, *, offset: int | None = None, deadline: Deadline = None
    ) -> int | None:
        return self._call(
            lambda end: self._inner.get(name, into, offset=offset, deadline=end), deadline
        )

    def head(self, name: str, *, deadline: Deadline = None) -> ObjectInfo | None:
        return self._call(lambda end: self._inner.head(name, deadline=end), deadline)

    def delete(
        self, names: Sequence[str], *, deadline: Deadline = None
    ) -> Mapping[str, StoreError]:
        """In batches, each with the time of one call: a million names take minutes."""
        failed: dict[str, StoreError] = {}
        for start in range(0, len(names), DELETES_MAX):
            batch = names[start : start + DELETES_MAX]
            failed |= self._call(functools.partial(self._delete, batch), deadline)
        return failed

    def _delete(self, names: Sequence[str], deadline: Deadline) -> Mapping[str, StoreError]:
        return self._inner.delete(names, deadline=deadline)

    def sweep(self, older_than_s: float) -> Iterator[int]:
        return self._inner.sweep(older_than_s)

    def close(self) -> None:
        self._inner.close()


class KeeperStore(WrappedStore):
    """Passes calls on until a time, and gives none a later deadline. With `only_reads` it reports
    success for every write, and leaves the store as it is."""

    def __init__(self, inner: Store, *, only_reads: bool = False) -> None:
        super().__init__(inner)
        self._only_reads = only_reads
        self._until = math.inf

    def __repr__(self) -> str:
        return f"KeeperStore({self._inner!r})"

    def put(self, *arguments: Any, **more: Any) -> PutOutcome:
        return PutOutcome.STORED if self._only_reads else super().put(*arguments, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        return {} if self._only_reads else super().delete(names, **more)

    def revoke(self, from_s: float = -math.inf) -> None:
        """From this time on (of `time.monotonic`) no call begins. Every call that begins before
        has it as its deadline; a listing ends with the page that is under way."""
        self._until = from_s

    def list(
        self, prefix: str = "", *, after: str = "", deadline: Deadline = None
    ) -> Iterator[ObjectInfo]:
        for info in self._inner.list(prefix, after=after, deadline=self._bound(deadline)):
            if self._until != math.inf:
                self._bound(deadline)
            yield info

    def _call(self, call: Callable[[float | None], _T], deadline: Deadline) -> _T:
        return call(self._bound(deadline))

    def _bound(self, deadline: Deadline) -> float | None:
        if self._until == math.inf:
            return deadline
        if time.monotonic() >= self._until:
            raise TimedOut("there was no time left for the store")
        return self._until if deadline is None else min(deadline, self._until)
