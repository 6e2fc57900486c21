"""Collects garbage below a url, without a server: too old, too much, left over by crashes.

Any process may do it at any time beside running servers: what one of them is just reading becomes
an ordinary miss there, and it hears of the rest by a manifest. Objects that kvtier did not name are
never touched.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator

import msgspec
import numpy as np

from kvtier.backends.object.housekeeping import empty_namespaces as bare
from kvtier.backends.object.housekeeping.empty_namespaces import EmptyNamespaces
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.object_names import parse_block
from kvtier.backends.object.stores.errors import Forbidden
from kvtier.backends.object.stores.store import Store, read_description
from kvtier.types import BlockKey

_CRASHED_S = 3600.0
"""A temporary file that has not been touched for so long has no writer any more."""

_AT_ONCE = 1 << 14
"""So many are deleted, and then written down: a manifest of that many gets through in time."""


class Doomed(msgspec.Struct, frozen=True):
    """An object that should go."""

    name: str
    size: int
    modified_s: float
    reason: str


class Survey(msgspec.Struct):
    """What lies below a url, and what of it should go, oldest first."""

    blocks: int = 0
    bytes: int = 0
    doomed: list[Doomed] = []
    bare: dict[str, int] = {}
    """How many bytes tell of each namespace that has no block, and that nobody uses."""

    @property
    def doomed_bytes(self) -> int:
        return sum(one.size for one in self.doomed)


def survey(
    store: Store,
    capacity: int,
    age_max_s: float | None,
    now: float,
    without: Collection[str] = (),
) -> Survey:
    """List everything and decide; deletes nothing. Raises StoreError. Namespaces in `without` count
    as if they were gone.

    Of what stays only times and sizes are held, because there may be millions: where the budget is
    exceeded, the oldest are listed once more.
    """
    found = Survey()
    beside = EmptyNamespaces()
    times, sizes = array("d"), array("Q")
    for info in store.list():
        if info.name.partition("/")[0] in without:
            continue
        parsed = parse_block(info.name)
        if parsed is None:
            beside.see(info)
            continue
        beside.holds(parsed[0])
        found.blocks += 1
        found.bytes += info.size
        if age_max_s is not None and now - info.modified_s > age_max_s:
            found.doomed.append(Doomed(info.name, info.size, info.modified_s, "too old"))
        else:
            times.append(info.modified_s)
            sizes.append(info.size)
    surplus = found.bytes - found.doomed_bytes - capacity
    if surplus > 0:
        others = {one.name for one in found.doomed}
        found.doomed += _oldest(store, times, sizes, surplus, others, without)
    found.doomed.sort(key=lambda one: one.modified_s)
    at = _by_the_store(now)
    for namespace, size in beside.found().items():
        if bare.remains(store, namespace, at) is not None:
            found.bare[namespace] = size
    return found


def _oldest(
    store: Store,
    times: array[float],
    sizes: array[int],
    surplus: int,
    others: set[str],
    without: Collection[str],
) -> Iterator[Doomed]:
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
        yield Doomed(info.name, info.size, info.modified_s, "over the budget")
        surplus -= info.size


def remove_bare(store: Store, namespace: str, now: float) -> bool:
    """Delete all that tells of a namespace without blocks, if nobody uses it. Raises StoreError."""
    return bare.remove(store, namespace, _by_the_store(now))


def _by_the_store(now: float) -> float:
    """A time that is not later than this by a store's clock, as far as clocks can be wrong."""
    return now - manifest.SKEW_US / 1e6


def collect(store: Store, found: Survey) -> tuple[int, int]:
    """Delete these objects, and write down that they are gone, a part of them at a time: all may
    take an hour, and what fails then must not cost what was done. How many went, and how many
    temporary files of crashed writers. Raises StoreError."""
    gone = 0
    for start in range(0, len(found.doomed), _AT_ONCE):
        some = found.doomed[start : start + _AT_ONCE]
        now_us = int(time.time() * 1e6)
        failed = store.delete([one.name for one in some])
        gone += len(some) - len(failed)
        by_namespace: dict[str, list[tuple[BlockKey, int]]] = defaultdict(list)
        for one in some:
            parsed = parse_block(one.name)
            if parsed is not None and one.name not in failed:
                by_namespace[parsed[0]].append(parsed[1:])
        for name, objects in by_namespace.items():
            _write_removed(store, name, objects, now_us)
    return gone, sum(store.sweep(_CRASHED_S))


def _write_removed(
    store: Store, namespace: str, objects: list[tuple[BlockKey, int]], now_us: int
) -> None:
    """Tell the servers of a namespace; where its description is unreadable they find out by
    themselves."""
    described = None
    with contextlib.suppress(Forbidden):
        described = read_description(store, namespace)
    if described is not None:
        keys, generations = zip(*objects, strict=True)
        entries = manifest.pack_entries(manifest.REMOVED, keys, generations, 0, now_us)
        Journal(store, described).append(entries)
