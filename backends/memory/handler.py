"""Moves records in and out of the store's slots, or lets others do so in place."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.backends.memory.store import MemorySpec, MemoryStore
from kvtier.core.interfaces.handler import HostHandler, own_spec
from kvtier.core.records.record import Buffer
from kvtier.types import BlockKey, LoadStoreSpec, Outcome


class MemoryHandler(HostHandler):
    """The store's slots are host memory: `views` gives them, `load` and `store` copy them."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, buffer in zip(own_spec(spec, MemorySpec).slots, keys, into, strict=True):
            if self._store.owners.get(slot) != key:
                outcomes.append(Outcome.GONE)
                continue
            record = self._store.record(slot)
            buffer[: len(record)] = record
            outcomes.append(Outcome.OK)
        return outcomes

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, record in zip(own_spec(spec, MemorySpec).slots, keys, records, strict=True):
            if self._store.owners.get(slot) != key:
                outcomes.append(Outcome.GONE)
                continue
            self._store.record(slot)[: len(record)] = record
            outcomes.append(Outcome.OK)
        return outcomes

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        return [self._store.record(slot) for slot in own_spec(spec, MemorySpec).slots]

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        self._store.landed[own_spec(spec, MemorySpec).slots[index]] = outcome
