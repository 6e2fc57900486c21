"""Collects garbage below a url without a server: too old, too much, left over by crashes.

Any process may do it at any time beside running servers. A block that one of them is just reading
is an ordinary miss there, and a manifest tells them of the rest. Objects that kvtier did not name
are never touched.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator

import msgspec
import numpy as np

from kvtier.backends.object.housekeeping import empty_namespaces
from kvtier.backends.object.housekeeping.empty_namespaces import EmptyNamespaces
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.object_names import ObjectKey, parse_block
from kvtier.backends.object.stores.errors import Forbidden
from kvtier.backends.object.stores.store import ObjectInfo, Store, read_description

_CRASHED_S = 3600.0
"""A temporary file that has not been touched for so long has no writer any more."""

_AT_ONCE = 1 << 14
"""So many blocks are deleted and then recorded: their manifest is written in time."""


class Survey(msgspec.Struct):
    """What lies below a url, and what of it should go, oldest first."""

    blocks: int = 0
    bytes: int = 0
    garbage: list[ObjectInfo] = []
    empty_namespaces: dict[str, int] = {}
    """How many bytes describe each namespace that has no block and that nobody uses."""

    @property
    def garbage_bytes(self) -> int:
        return sum(one.size for one in self.garbage)


def survey(
    store: Store,
    capacity: int,
    age_max_s: float | None,
    now: float,
    without: Collection[str] = (),
) -> Survey:
    """List everything and decide; deletes nothing. Raises StoreError. Namespaces in `without` count
    as if they were gone.

    There may be millions of blocks, so only times and sizes are kept. If the budget is exceeded,
    everything is listed once more to find the names of the oldest.
    """
    found = Survey()
    empty = EmptyNamespaces()
    times, sizes = array("d"), array("Q")
    for info in store.list():
        if info.name.partition("/")[0] in without:
            continue
        parsed = parse_block(info.name)
        if parsed is None:
            empty.add_other(info)
            continue
        empty.add_block(parsed[0])
        found.blocks += 1
        found.bytes += info.size
        if age_max_s is not None and now - info.modified_s > age_max_s:
            found.garbage.append(info)
        else:
            times.append(info.modified_s)
            sizes.append(info.size)
    surplus = found.bytes - found.garbage_bytes - capacity
    if surplus > 0:
        others = {one.name for one in found.garbage}
        found.garbage += _oldest(store, times, sizes, surplus, others, without)
    found.garbage.sort(key=lambda one: one.modified_s)
    for namespace, size in empty.found().items():
        if empty_namespaces.is_unused(store, namespace, _store_time(now)):
            found.empty_namespaces[namespace] = size
    return found


def _oldest(
    store: Store,
    times: array[float],
    sizes: array[int],
    surplus: int,
    others: set[str],
    without: Collection[str],
) -> Iterator[ObjectInfo]:
    """The oldest blocks that are together as large as the surplus."""
    order = np.argsort(np.frombuffer(times), kind="stable")
    summed = np.cumsum(np.frombuffer(sizes, np.uint64)[order])
    last = min(int(np.searchsorted(summed, surplus)), len(order) - 1)
    until = times[order[last]]
    chosen = [
        info
        for info in store.list()
        if info.modified_s <= until
        and info.name not in others
        and parse_block(info.name)
        and info.name.partition("/")[0] not in without
    ]
    for info in sorted(chosen, key=lambda info: info.modified_s):
        if surplus <= 0:
            return
        yield info
        surplus -= info.size


def remove_empty_namespace(store: Store, namespace: str, now: float) -> bool:
    """Delete what describes a namespace without blocks, if nobody uses it. Raises StoreError."""
    return empty_namespaces.remove(store, namespace, _store_time(now))


def _store_time(now: float) -> float:
    """A time that is not later than the store's own, as far as clocks can be wrong."""
    return now - manifest.SKEW_US / 1e6


def collect(store: Store, found: Survey) -> int:
    """Delete the garbage of a survey, and temporary files of crashed writers, and record that it is
    gone. Returns how many blocks went. Raises StoreError.

    It works batch by batch: all of it may take an hour, and an error must not undo what is done.
    """
    gone = 0
    for start in range(0, len(found.garbage), _AT_ONCE):
        batch = found.garbage[start : start + _AT_ONCE]
        now_us = int(time.time() * 1e6)
        failed = store.delete([one.name for one in batch])
        gone += len(batch) - len(failed)
        by_namespace: dict[str, list[ObjectKey]] = defaultdict(list)
        for one in batch:
            parsed = parse_block(one.name)
            if parsed is not None and one.name not in failed:
                by_namespace[parsed[0]].append(parsed[1:])
        for name, objects in by_namespace.items():
            _record_removed(store, name, objects, now_us)
    for _ in store.sweep(_CRASHED_S):
        pass
    return gone


def _record_removed(store: Store, namespace: str, objects: list[ObjectKey], now_us: int) -> None:
    """Tell the servers of a namespace by a manifest. If its description cannot be read, their next
    audit finds out."""
    described = None
    with contextlib.suppress(Forbidden):
        described = read_description(store, namespace)
    if described is not None:
        keys, generations = zip(*objects, strict=True)
        entries = manifest.pack_entries(manifest.REMOVED, keys, generations, 0, now_us)
        Journal(store, described).append(entries)
