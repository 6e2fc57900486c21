"""The keeper of a tier that is only read: it learns what others write, and changes nothing.

It needs no right to write, claims no room, and deletes nothing whatever the budget says: that is
for those who write. What it cannot read it forgets until the next audit, which here is no listing
of everything but a look at all that is written down.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.keeper_limits import Limits
from kvtier.backends.object.housekeeping.use_counts import Uses
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome, Store
from kvtier.backends.object.stores.wrapper import WrappedStore
from kvtier.types import Namespace

_T = TypeVar("_T")


class Reader(Keeper):
    """A keeper that reads, and takes what there would be to write for done."""

    def __init__(self, store: Store, namespace: Namespace, limits: Limits) -> None:
        super().__init__(Unchanged(store), namespace, limits)
        self.uses = Uses(self._store, namespace, math.inf, self._lock_yield.rest)

    def hurry(self) -> None:
        """No claim makes room here."""

    def _audit(self, stop_at: float | None = None) -> None:
        self._next_look = self._steady() + self.limits.refresh_s
        self.outbox.write_down()
        self._tell_stated()
        self.audited = True
        self._next_audit = self._steady() + self.limits.audit_s * random.uniform(0.8, 1.2)

    def _see_others(self) -> None:
        self._next_look = self._steady() + self.limits.refresh_s
        if not self._unheard:
            self._tell(self._journal.news())

    def _end(self) -> None:
        self._claims.close(clean=True)  # which were never published


class Unchanged(WrappedStore):
    """Takes what is to be written or deleted for done, and leaves the store as it is."""

    def __repr__(self) -> str:
        return f"Unchanged({self._inner!r})"

    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        return PutOutcome.STORED

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        return {}

    def sweep(self, older_than_s: float) -> Iterator[int]:
        return iter(())

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after=after, deadline=deadline)

    def _call(self, call: Callable[[float | None], _T], deadline: float | None) -> _T:
        return call(deadline)
