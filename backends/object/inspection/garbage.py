"""What lies in a store that nobody will ask for again, and `kvtier gc`, which removes it.

Any process may collect garbage at any time beside running servers. A block that one of them is just
reading is an ordinary miss there, and a manifest tells them of the rest. Objects that kvtier did
not name are never touched.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from kvtier.backends.object import manifests, namespaces
from kvtier.backends.object.inspection.store_access import (
    left_behind,
    local_folder,
    opened_store,
    remove_idle,
    remove_left,
)
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.object_names import ObjectKey, parse_block
from kvtier.backends.object.settings import ObjectSettings, capacity_of
from kvtier.backends.object.stores.store import CRASHED_S, ObjectInfo, Store
from kvtier.errors import MediumError
from kvtier.inspect import Contents, Garbage, Part, Reporter, inspector

_AT_ONCE = 1 << 14
"""So many blocks are deleted and then recorded as removed: their manifest is written in time."""


# -- for commands ----------------------------------------------------------------------------------


def find_garbage(
    settings: ObjectSettings,
    contents: Contents,
    served: Mapping[str, float],
    idle_s: float | None,
    reporter: Reporter,
) -> Iterator[Garbage]:
    """Idle namespaces, blocks too old or over the budget, what told of blocks that went, and what
    was only written to try the store. `served` says when a server last used a namespace."""
    idle = _idle(contents.parts, served, idle_s)
    for part in idle:
        yield Garbage(
            "namespace that nobody used for so long",
            _below(settings, part.namespace),
            part.bytes,
            partial(remove_idle, settings, part.namespace, idle_s or 0.0, reporter),
        )
    folder = local_folder(settings.url)
    if folder is not None:
        yield from inspector.left_behind(folder)
    made = folder is None or folder.exists()  # opening the store would make it
    if made and not contents.troubles:
        for name, size in left_behind(settings).items():
            what = "what a measurement or a doctor left that was killed"
            remove = partial(remove_left, settings, name, reporter)
            yield Garbage(what, _below(settings, name), size, remove)
        yield from _surveyed(settings, {part.namespace for part in idle})


def _idle(parts: Sequence[Part], served: Mapping[str, float], idle_s: float | None) -> list[Part]:
    if idle_s is None:
        return []
    now = time.time()
    return [
        part
        for part in parts
        if now - max(part.newest or 0.0, served.get(part.namespace, 0.0)) > idle_s
    ]


def _below(settings: ObjectSettings, namespace: str) -> str:
    return f"{settings.url.rstrip('/')}/{namespace}"


def _surveyed(settings: ObjectSettings, going: set[str]) -> Iterator[Garbage]:
    capacity = capacity_of(settings)
    age_s = None if settings.age_max is None else settings.age_max.seconds
    if settings.only_read:  # how much others keep, and for how long, is up to them
        capacity, age_s = sys.maxsize, None

    def look(store: Store) -> Survey:
        return survey(store, capacity, age_s, time.time(), going)

    def remove_blocks() -> bool:
        with opened_store(settings) as store:
            found = look(store)
            gone = collect(store, found)
        if kept := len(found.garbage) - gone:
            raise MediumError(f"the store kept {kept} of {len(found.garbage)} blocks: try again")
        return True

    def remove_namespace(namespace: str) -> bool:
        with opened_store(settings) as store:
            return namespaces.remove(store, namespace, store_time(time.time()))

    with opened_store(settings) as store:
        found = look(store)
    if found.garbage:
        what = f"{len(found.garbage)} blocks that are too old or over the budget"
        yield Garbage(what, settings.url, found.garbage_bytes, remove_blocks)
    for namespace, size in found.empty_namespaces.items():
        what = "what told of a namespace without blocks"
        yield Garbage(what, _below(settings, namespace), size, partial(remove_namespace, namespace))


# -- in the store ----------------------------------------------------------------------------------


class Survey(msgspec.Struct):
    """What of that which lies below a url should go, the oldest blocks first."""

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

    There may be millions of blocks, so only times and sizes are kept. If some must go, everything
    is listed once more to find the names of the oldest.
    """
    descriptions = namespaces.Descriptions()
    times, sizes = array("d"), array("Q")
    for info in _listed(store, without):
        if parsed := parse_block(info.name):
            descriptions.add_block(parsed[0])
            times.append(info.modified_s)
            sizes.append(info.size)
        else:
            descriptions.add_other(info)
    order = np.argsort(np.asarray(times), kind="stable")
    oldest, summed = np.asarray(times)[order], np.cumsum(np.asarray(sizes)[order])
    found = Survey()
    count = 0 if age_max_s is None else int(np.searchsorted(oldest, now - age_max_s))
    if len(order) and (surplus := int(summed[-1]) - capacity) > 0:
        count = max(count, int(np.searchsorted(summed, surplus)) + 1)
    if count:
        blocks = (info for info in _listed(store, without) if parse_block(info.name))
        chosen = [info for info in blocks if info.modified_s <= oldest[count - 1]]
        found.garbage = sorted(chosen, key=lambda info: info.modified_s)[:count]
    for namespace, size in descriptions.without_blocks().items():
        if namespaces.leftovers(store, namespace, store_time(now)) is not None:
            found.empty_namespaces[namespace] = size
    return found


def _listed(store: Store, without: Collection[str]) -> Iterator[ObjectInfo]:
    return (info for info in store.list() if info.name.partition("/")[0] not in without)


def store_time(now: float) -> float:
    """A time that is not later than the store's own, as far as clocks can be wrong."""
    return now - manifests.SKEW_US / 1e6


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
            if one.name not in failed and (parsed := parse_block(one.name)) is not None:
                by_namespace[parsed[0]].append(parsed[1:])
        for name, objects in by_namespace.items():
            Journal(store, name).append(manifests.removals(objects, now_us))
    for _ in store.sweep(CRASHED_S):
        pass
    return gone
