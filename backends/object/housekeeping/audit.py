"""An audit: everything that the store lists against everything that is recorded.

It finds blocks that no manifest lists (their writer died), entries without an object (somebody
deleted it), objects whose deletion was lost, and what other namespaces take of the budget. It
deletes only objects that have names of kvtier's blocks, and only those that are removed, too old,
or, in other namespaces, the oldest when the budget is exceeded.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object.housekeeping.empty_namespaces import EmptyNamespaces
from kvtier.backends.object.housekeeping.foreign_blocks import ForeignBlocks
from kvtier.backends.object.housekeeping.keeper_limits import ProtectedBlocks
from kvtier.backends.object.lock_yield import CHUNK, LockYield
from kvtier.backends.object.manifests.block_rows import Rows
from kvtier.backends.object.manifests.manifest import (
    ADDED,
    ENTRY,
    REMOVED,
    SKEW_US,
    Entries,
    fingerprints,
    objects_of,
)
from kvtier.backends.object.manifests.reconcile import Reconciliation
from kvtier.backends.object.object_names import block_name, parse_block
from kvtier.backends.object.stores.store import ObjectInfo, Store, delete_batches
from kvtier.slab.layout import keys_of
from kvtier.types import BlockKey

_YOUNG_S = 120.0


class Unfinished(Exception):
    """The time for a listing was over before its end."""


class AuditInput(msgspec.Struct, frozen=True):
    """What an audit starts from."""

    namespace: str
    recorded: Reconciliation
    """All that is recorded, and what the tier offered before the listing began."""
    capacity: int
    needs_room: bool
    too_old_s: float
    """Blocks of this time and before must go. The time is by the store's clock: ours may be wrong
    by days."""
    reader_grace_s: float
    """How long a removed object may still be read by a process that has not heard of it."""
    writers_died: bool
    """If so, objects that they removed may be there, and no other writer will delete them."""
    now: float
    protected: ProtectedBlocks = {}
    stop_at: float | None = None
    """When to give up (`time.monotonic`)."""


class AuditResult(msgspec.Struct):
    """What the store holds, as far as it was not known."""

    orphans: Rows
    """Blocks that no manifest lists, or lists with another size."""
    gone: Rows
    """Known blocks without an object, or too old."""
    foreign: dict[str, int]
    """Bytes of other namespaces."""
    empty_namespaces: EmptyNamespaces


def audit(store: Store, inputs: AuditInput, lock_yield: LockYield) -> AuditResult:
    """List everything and compare; raises StoreError, or Unfinished."""
    comparison = _Comparison(inputs)
    lock_yield.begin()
    for info in store.list():
        lock_yield()
        if inputs.stop_at is not None and time.monotonic() > inputs.stop_at:
            raise Unfinished
        comparison.add(info)
    comparison.compare()
    _delete_surplus(store, inputs, comparison, lock_yield)
    _delete(store, comparison.leftovers, lock_yield)
    gone = _confirm_gone(store, inputs, *comparison.missing(), lock_yield)
    return AuditResult(
        comparison.orphans, gone, comparison.foreign.bytes, comparison.empty_namespaces
    )


class _Comparison:
    """What the listing has shown until now, compared with what is recorded."""

    def __init__(self, inputs: AuditInput) -> None:
        self.orphans = Rows()
        self.empty_namespaces = EmptyNamespaces()
        self.foreign = ForeignBlocks()
        self.leftovers: list[str] = []
        """Objects of this namespace to delete."""
        self.own_bytes = 0
        self._inputs = inputs
        # a removal of a later time is by a wrong clock: its object is offered until then, because
        # nobody would count it otherwise
        self._latest = inputs.now + SKEW_US / 1e6
        self._present = np.zeros(len(inputs.recorded.entries), np.bool_)
        """For each entry, whether its object is there to stay."""
        self._listed = self._present.copy()
        """For each entry, whether its object was listed."""
        self._unrecorded = [np.zeros(0, np.uint64)]
        """Fingerprints of listed objects that no entry is about."""
        self._infos: list[ObjectInfo] = []
        """Blocks that wait to be compared: many at a time cost less."""
        self._keys: list[BlockKey] = []
        self._generations: list[int] = []

    def add(self, info: ObjectInfo) -> None:
        parsed = parse_block(info.name)
        if parsed is None:
            self.empty_namespaces.add_other(info)
            return
        namespace, key, generation = parsed
        self.empty_namespaces.add_block(namespace)
        if namespace != self._inputs.namespace:
            protected = key in self._inputs.protected.get(namespace, ())
            self.foreign.add(namespace, info, deletable=not protected)
            return
        self.own_bytes += info.size
        self._infos.append(info)
        self._keys.append(key)
        self._generations.append(generation)
        if len(self._infos) == CHUNK:
            self.compare()

    def compare(self) -> None:
        """Compare the blocks that wait."""
        inputs, recorded = self._inputs, self._inputs.recorded
        objects = objects_of(self._keys, self._generations)
        rows = recorded.find(objects)
        found = np.zeros(len(rows), ENTRY)  # without a kind if no entry is about the object
        found[rows >= 0] = recorded.entries[rows[rows >= 0]]
        present = np.ones(len(rows), np.bool_)
        columns = found["kind"].tolist(), found["time_us"].tolist(), found["size"].tolist()
        for at, (info, kind, time_us, size) in enumerate(zip(self._infos, *columns, strict=True)):
            # a time in the future would outlast every removal
            since = max(time_us / 1e6, min(info.modified_s, inputs.now))
            young = inputs.now - since < inputs.reader_grace_s
            # it was stored again after its removal, and its writer may be about to record that
            again = inputs.writers_died and young and _earliest(info) > time_us / 1e6
            if kind == REMOVED and time_us / 1e6 <= self._latest and not again:
                present[at] = False
                if inputs.writers_died or not young:
                    self.leftovers.append(info.name)
            elif info.modified_s <= inputs.too_old_s:
                present[at] = False
                self.leftovers.append(info.name)
            elif size != info.size or kind != ADDED:
                self.orphans.add(self._keys[at], self._generations[at], info.size, since)
        self._present[rows[present & (rows >= 0)]] = True
        self._listed[rows[rows >= 0]] = True
        if len(recorded.unrecorded):
            objects = objects[present & (rows < 0)]
            self._unrecorded.append(fingerprints(objects, objects["generation"]))
        self._infos, self._keys, self._generations = [], [], []

    def missing(self) -> tuple[Entries, npt.NDArray[np.bool_]]:
        """Blocks that are offered or recorded and not there to stay, and which of them were not
        listed at all."""
        recorded = self._inputs.recorded
        wanted = (recorded.offered | (recorded.entries["kind"] == ADDED)) & ~self._present
        unrecorded = recorded.unrecorded
        prints = fingerprints(unrecorded, unrecorded["generation"])
        unseen = np.isin(prints, np.concatenate(self._unrecorded), invert=True)
        unlisted = np.append(~self._listed[wanted], np.ones(unseen.sum(), np.bool_))
        return np.concatenate([recorded.entries[wanted], unrecorded[unseen]]), unlisted


def _earliest(info: ObjectInfo) -> float:
    """The earliest time at which it can have been stored: some stores round up to whole seconds."""
    return info.modified_s - (1.0 if info.modified_s.is_integer() else 0.0)


def _delete_surplus(
    store: Store, inputs: AuditInput, comparison: _Comparison, lock_yield: LockYield
) -> None:
    """Delete the oldest blocks of other namespaces if the budget is exceeded."""
    foreign = comparison.foreign
    sizes = foreign.take_surplus(
        comparison.own_bytes, inputs.capacity, lock_yield, needs_room=inputs.needs_room
    )
    failed = _delete(store, list(sizes), lock_yield)
    for name, size in sizes.items():
        if name not in failed:
            foreign.remove(name, size)


def _delete(store: Store, names: list[str], lock_yield: LockYield) -> set[str]:
    """Delete objects, which may take minutes; returns those that could not be deleted."""
    failed: set[str] = set()
    for batch in delete_batches(store, names):
        failed.update(store.delete(batch))
        lock_yield()
    return failed


def _confirm_gone(
    store: Store,
    inputs: AuditInput,
    missing: Entries,
    unlisted: npt.NDArray[np.bool_],
    lock_yield: LockYield,
) -> Rows:
    """Blocks that are gone for certain.

    The store is asked about every young one, because it may have come while the listing was under
    way, or have been stored again after a removal. Of the others that were not listed, the store is
    asked about the latest of each chunk. If that is there, the listing was not complete, and the
    chunk waits for the next audit.
    """

    def is_there(key: BlockKey, generation: int) -> bool:
        return store.head(block_name(inputs.namespace, key, generation)) is not None

    gone = Rows()
    times = missing["time_us"] / 1e6
    young = times > inputs.now - _YOUNG_S
    for piece in lock_yield.chunks(len(missing)):
        some = missing[piece]
        columns = some["generation"].tolist(), times[piece].tolist(), young[piece].tolist()
        rows = list(zip(keys_of(some), *columns, strict=True))
        old = np.flatnonzero(unlisted[piece] & ~young[piece]).tolist()
        waiting = set(old) if old and is_there(*rows[old[-1]][:2]) else ()
        for row, (key, generation, at, is_young) in enumerate(rows):
            lock_yield()
            if row not in waiting and not (is_young and is_there(key, generation)):
                # later than all that is recorded, even by a clock that is ahead
                gone.add(key, generation, 0, max(at, inputs.now))
    return gone
