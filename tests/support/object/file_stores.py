"""A store in a folder, and bytes in and out of it in one call."""

from __future__ import annotations

from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import PutOutcome


def put(store: FileStore, name: str, data: bytes = b"bytes") -> PutOutcome:
    return store.put(name, [memoryview(data)])


def get(store: FileStore, name: str, size: int = 5) -> int | None:
    return store.get(name, memoryview(bytearray(size)))
