"""An audit: everything that a bucket lists against everything that is recorded.

It finds blocks that no manifest lists (their server died), entries without an object (somebody
deleted it), and objects whose deletion was lost. It decides, and changes nothing itself: that is
for the caretaker. Objects that kvtier did not name are not even counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from itertools import groupby, islice

import msgspec
import numpy as np

from kvtier.backends.object.block_index import BlockIndex
from kvtier.backends.object.gil_yield import CHUNK, GilYield
from kvtier.backends.object.manifests import (
    ADDED,
    ENTRY,
    REMOVED,
    SKEW_US,
    Entries,
    Prints,
    joined,
    key_prints,
    object_prints,
    objects_in,
    objects_of,
    removals,
)
from kvtier.backends.object.namespaces import Descriptions
from kvtier.backends.object.object_names import ObjectKey, block_name, parse_block
from kvtier.backends.object.stores.store import ObjectInfo, Store, check_namespaces

_ASKED_MAX = 512
"""The store is asked about so many missing objects of a namespace, one by one; of more, about one
of each piece."""


class Unfinished(Exception):
    """The time for a listing was over before its end."""


class Findings(msgspec.Struct):
    """What a listing has shown of one namespace."""

    corrections: list[Entries] = []
    """Entries about blocks that are recorded otherwise."""
    leftovers: list[ObjectKey] = []
    """Objects to delete: removed, too old, or another object of the same block is there."""


class Audit:
    """One listing of everything below a url, compared with the indexes of its namespaces."""

    def __init__(
        self,
        store: Store,
        index_of: Callable[[str], BlockIndex],
        *,
        now_s: float,
        too_old_s: float = -math.inf,
        gil_yield: GilYield,
    ) -> None:
        """`too_old_s`: blocks of this time and before must go, by the store's clock."""
        self._store = store
        self._index_of = index_of
        self._now_us = int(now_s * 1e6)
        self._too_old_s = too_old_s
        self._yield = gil_yield
        self.findings: dict[str, Findings] = {}
        self.descriptions = Descriptions()

    def run(
        self, known: Collection[str], *, prefix: str = "", stop_at: float | None = None
    ) -> None:
        """List and compare; `known` are all namespaces that have an index. Raises StoreError, or
        Unfinished."""
        expected = {name: object_prints(self._index_of(name).blocks()) for name in known}
        for namespace, blocks in groupby(self._blocks(prefix, stop_at), key=lambda block: block[0]):
            check_namespaces(self.findings)
            self.descriptions.add_block(namespace)
            found = self.findings[namespace] = Findings()
            listed = []
            only = (block[1:] for block in blocks)
            while some := list(islice(only, CHUNK)):
                listed.append(self._compare(self._index_of(namespace), found, some))
                self._yield()
            wanted = expected.pop(namespace, np.zeros(0, np.uint64))
            unlisted = np.setdiff1d(wanted, object_prints(joined(listed)))
            self._note_missing(namespace, found, unlisted)
            self._note_copies(namespace, found)
        for namespace, unlisted in expected.items():
            found = self.findings[namespace] = Findings()
            self._note_missing(namespace, found, unlisted)

    def _blocks(
        self, prefix: str, stop_at: float | None
    ) -> Iterator[tuple[str, ObjectInfo, ObjectKey]]:
        """Namespace, object and key of each block."""
        self._yield.begin()
        for info in self._store.list(prefix):
            self._yield()
            if stop_at is not None and time.monotonic() > stop_at:
                raise Unfinished
            parsed = parse_block(info.name)
            if parsed is None:
                self.descriptions.add_other(info)
            else:
                yield parsed[0], info, parsed[1:]

    def _compare(
        self, index: BlockIndex, found: Findings, some: list[tuple[ObjectInfo, ObjectKey]]
    ) -> Entries:
        """Compare some listed blocks; returns their objects."""
        objects = objects_of([key for _, key in some])
        rows = index.find(objects)
        recorded = np.zeros(len(rows), ENTRY)  # without a kind if no entry is about the object
        recorded[rows >= 0] = index.entries[rows[rows >= 0]]
        columns = (recorded[name].tolist() for name in ("kind", "time_us", "size"))
        wrong: list[int] = []
        for at, (kind, time_us, size) in enumerate(zip(*columns, strict=True)):
            info, key = some[at]
            modified_us = int(info.modified_s * 1e6)
            # stored again after it was removed, whatever the clocks say
            again = modified_us > time_us + SKEW_US
            old = info.modified_s <= self._too_old_s
            if old or (kind == REMOVED and not again):
                found.leftovers.append(key)
                if kind != REMOVED:
                    found.corrections.append(self._removed([key], time_us))
            elif kind != ADDED or size != info.size:
                wrong.append(at)
                objects[at]["kind"], objects[at]["size"] = ADDED, info.size
                # later than what it corrects, but not in the future: it would outlast any removal
                objects[at]["time_us"] = max(time_us + 2, min(modified_us, self._now_us))
        if wrong:
            found.corrections.append(objects[wrong])
        return objects

    def _removed(self, keys: list[ObjectKey], after_us: int) -> Entries:
        return removals(keys, max(self._now_us, after_us + 1))

    def _note_missing(self, namespace: str, found: Findings, unlisted: Prints) -> None:
        """Blocks that are recorded and gone for certain."""
        if not len(unlisted):
            return
        entries = self._index_of(namespace).blocks()
        missing = entries[np.isin(object_prints(entries), unlisted)]
        every = len(missing) <= _ASKED_MAX
        for piece in self._yield.chunks(len(missing)):
            objects = missing[piece]
            keys = objects_in(objects)
            if every:
                keys = [key for key in keys if not self._is_there(namespace, key)]
            elif self._is_there(namespace, keys[-1]):
                continue  # the listing was not complete: the next audit looks again
            if keys:
                last_us = int(objects["time_us"].max())
                found.corrections.append(self._removed(keys, last_us))

    def _is_there(self, namespace: str, key: ObjectKey) -> bool:
        self._yield()
        return self._store.head(block_name(namespace, *key)) is not None

    def _note_copies(self, namespace: str, found: Findings) -> None:
        """Of several objects of one block only that of the latest generation stays."""
        entries = self._index_of(namespace).blocks()
        entries = entries[np.argsort(entries["generation"], kind="stable")[::-1]]
        if not len(entries) or entries[0]["generation"] == 0:
            return
        _, first = np.unique(key_prints(entries), return_index=True)
        copies = np.ones(len(entries), np.bool_)
        copies[first] = False
        if copies.any():
            spare = entries[copies]
            keys = objects_in(spare)
            found.leftovers += keys
            found.corrections.append(self._removed(keys, int(spare["time_us"].max())))
