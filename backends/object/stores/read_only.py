"""A store that is only read: what would be written or deleted is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import PutOutcome
from kvtier.backends.object.stores.wrapper import WrappedStore


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
