"""Tiers whose keepers work when a test says so, and what lies in their stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.backends.object import budget
from kvtier.backends.object.caretaker import Limits
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.manifests import ADDED, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import AccessDenied, StoreError, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome, Store
from kvtier.backends.object.tier import ObjectTier
from kvtier.eviction import create_policy
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Namespace

RECORD = 12288
CAPACITY = 1 << 40


class ListedStore(FileStore):
    """A folder of manifests beside blocks that only a listing knows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.blocks: list[ObjectInfo] = []

    def hold(self, keys: list[BlockKey], modified_s: float = 1e9) -> None:
        names = [block_name(NAMESPACE.id, key) for key in keys]
        self.blocks = [ObjectInfo(name, RECORD, modified_s) for name in names]

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        after = more.get("after", "")
        beside = (i for i in super().list(prefix, **more) if "/blocks/" not in i.name)
        blocks = (i for i in self.blocks if i.name.startswith(prefix) and i.name > after)
        return iter(sorted([*beside, *blocks], key=lambda info: info.name))


class LockedStore(FileStore):
    """A folder that holds on to some objects, as buckets can."""

    def __init__(self, folder: Path, locked: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__(folder)
        self.locked = locked

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        super().delete([name for name in names if not self.locked(name)], **more)
        return {name: AccessDenied("locked") for name in names if self.locked(name)}


class UnwellStore(FileStore):
    """A folder; `fails` says of a call and a name why it fails, or nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fails: Callable[[str, str], Exception | None] = lambda call, name: None

    def _try(self, call: str, name: str) -> None:
        if (error := self.fails(call, name)) is not None:
            raise error

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        self._try("put", name)
        return super().put(name, buffers, **more)

    def get(self, name: str, into: Buffer, **more: Any) -> int | None:
        self._try("get", name)
        return super().get(name, into, **more)

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        self._try("list", prefix)
        return super().list(prefix, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        self._try("delete", " ".join(names))
        return super().delete(names, **more)


def no_full_listing(call: str, name: str) -> Unavailable | None:
    """What an `UnwellStore` does that lists namespaces, and not all."""
    return Unavailable("not now") if (call, name) == ("list", "") else None


def nothing_at_all(call: str, name: str) -> Unavailable:
    """What one does that is away."""
    return Unavailable("the store is away")


class Clock:
    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class LastWins(FileStore):
    """A store that does not refuse what is there."""

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        return super().put(name, buffers, **(more | {"if_absent": False}))


def created(
    store: Store,
    capacity: int = CAPACITY,
    *,
    kind: type[Keeper] = Keeper,
    namespace: Namespace = NAMESPACE,
    clock: Callable[[], float] = time.time,
    steady: Callable[[], float] = budget.clock,
    **limits: Any,
) -> tuple[Keeper, ObjectTier]:
    chosen = Limits(capacity, **{"refresh_s": 600.0, "audit_s": 600.0} | limits)
    keeper = kind(store, namespace, chosen, clock=clock, steady=steady)
    return keeper, ObjectTier(keeper, create_policy())


def opened(store: Store, capacity: int = CAPACITY, **more: Any) -> tuple[Keeper, ObjectTier]:
    """The tier offers what is written down in the store."""
    keeper, tier = created(store, capacity, **more)
    keeper.open(tier.offered)
    tier.start()
    return keeper, tier


def look(keeper: Keeper, tier: ObjectTier) -> None:
    """The keeper's look, as if it were due, and the tier hears of it."""
    keeper._next_look = 0.0
    keeper.run_once()
    tier.tick()


def filled(store: FileStore, count: int) -> list[BlockKey]:
    """Blocks that lie there, and are written down."""
    keys = make_keys(count)
    for key in keys:
        store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(RECORD))])
    Journal(store, NAMESPACE.id).append(
        pack_entries(ADDED, keys, [0] * count, [RECORD] * count, [10**15] * count)
    )
    return keys


def blocks_in(store: FileStore) -> int:
    return sum("/blocks/" in info.name for info in store.list())
