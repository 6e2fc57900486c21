"""A store that is only read: what would be written or deleted is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import Buffer, PutOutcome
from kvtier.backends.object.stores.wrapper import WrappedStore


class ReadOnlyStore(WrappedStore):
    """Reports success for every write, and leaves the store as it is."""

    def __repr__(self) -> str:
        return f"ReadOnlyStore({self._inner!r})"

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
