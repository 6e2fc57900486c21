"""Tiers whose keepers work when a test says so, and what lies in their stores."""

from __future__ import annotations

from kvtier.backends.object.files import FileStore
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.limits import Limits
from kvtier.backends.object.manifest import ADDED, pack_entries
from kvtier.backends.object.names import block_name
from kvtier.backends.object.tier import ObjectTier
from kvtier.core.eviction import create_policy
from kvtier.testing.records import NAMESPACE, make_keys
from kvtier.types import BlockKey

RECORD = 12288
CAPACITY = 1 << 40


def opened(store: FileStore) -> tuple[Keeper, ObjectTier]:
    keeper = Keeper(store, NAMESPACE, Limits(CAPACITY, refresh_s=600.0, audit_s=600.0))
    return keeper, ObjectTier(keeper, create_policy())


def filled(store: FileStore, count: int) -> list[BlockKey]:
    """Blocks that lie there, and are written down."""
    keys = make_keys(count)
    for key in keys:
        store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(RECORD))])
    Journal(store, NAMESPACE).append(
        pack_entries(ADDED, keys, [0] * count, [RECORD] * count, [10**15] * count)
    )
    return keys


def blocks_in(store: FileStore) -> int:
    return sum("/blocks/" in info.name for info in store.list())
