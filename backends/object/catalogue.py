"""What one server knows of a namespace in an object store, and how it learns it.

What a slab tier calls a slot is only a handle here: room is counted in bytes. What other servers
did, and what the keeper has deleted, comes as updates from the keeper. A call takes in a limited
number of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.tombstones import Tombstones
from kvtier.backends.object.housekeeping.updates import Update
from kvtier.backends.object.manifests.block_rows import Rows
from kvtier.backends.object.object_names import ObjectKey, block_name
from kvtier.eviction import EvictionPolicy
from kvtier.slab.catalogue import SlabTier
from kvtier.types import BlockKey, EventKind, Fate

_ROWS_AT_ONCE = 512
"""So many updated blocks are taken in by one call."""
_DROPS_AT_ONCE = 128
_HANDLES_MIN = 1024
_HANDLES_MAX = 1 << 14
"""More new handles at once, beside millions, would keep a request waiting."""


class ObjectCatalogue(SlabTier):
    """The blocks of one namespace below a url that any number of writers share."""

    def __init__(
        self,
        keeper: Keeper,
        policy: EvictionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._namespace = keeper.namespace
        super().__init__("object", keeper.block_bytes, policy, clock)
        self._keeper = keeper
        self._outbox = keeper.outbox
        self._budget = keeper.budget
        self._sizes = array("q")
        self._times = array("d")
        self._unused_handles: list[int] = []
        self._generation: dict[BlockKey, int] = {}
        """Generations that are not 0, of blocks that are resident, reserved or doomed."""
        self._tombstones = Tombstones()
        self._deleting: dict[int, list[ObjectKey]] = {}
        """By slot, the objects that the keeper is deleting."""
        self._unrecorded: set[int] = set()
        """Slots whose bytes no manifest lists, until they are committed or deleted."""
        self._surplus = 0
        """Bytes that are still to be dropped to keep the budget."""

    def start(self) -> None:
        """Take in all that the keeper has learnt while it was opened."""
        updates = self._keeper.updates
        while updates:
            self._apply(updates[0])
            updates.popleft()
        while self._surplus > 0:
            self._drop_surplus()
        self.learning = not self._keeper.catalogued
        self._events.clear()

    # -- updates ---------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        updates = self._keeper.updates
        rows = 0
        while updates and rows < _ROWS_AT_ONCE:
            update = updates[0]
            self._apply(update)
            updates.popleft()  # not earlier: the keeper counts on what waits there
            rows += 1 + len(update.added or ()) + len(update.removed or ()) + len(update.deleted)
        if self._surplus > 0:
            self._drop_surplus()

    def _apply(self, update: Update) -> None:
        # not below 0: two audits without a call of ours both report the same bytes
        self._budget.uncatalogued = max(0, self._budget.uncatalogued - update.recatalogued)
        if update.added is not None:
            self._apply_added(update.added)
        if update.removed is not None:
            self._apply_removed(update.removed)
        for slot in update.deleted:
            self._on_deleted(slot)
        if update.grant is not None:
            self._budget.apply(update.grant)
            self._surplus = self._budget.surplus()

    def _apply_added(self, rows: Rows) -> None:
        """Offer new blocks; correct the sizes of known ones."""
        if not self._all_new(rows):
            rows = self._new_among(rows)
        slots = self._take_handles(len(rows))
        for slot, size, at in zip(slots, rows.sizes, rows.times, strict=True):
            self._sizes[slot] = size
            self._times[slot] = at
        self._budget.used += sum(rows.sizes)
        if any(rows.generations):
            found = zip(rows.keys, rows.generations, strict=True)
            self._generation.update({key: generation for key, generation in found if generation})
        self._adopt(slots, rows.keys, rows.times)
        self._events.add(EventKind.STORED, rows.keys)

    def _all_new(self, rows: Rows) -> bool:
        """Whether these rows can be taken as they are, which is so when a tier is opened."""
        tables = (self._where, self._reserved, self._dropped_pinned, self._tombstones)
        return (
            all(table.keys().isdisjoint(rows.keys) for table in tables)
            and len(set(rows.keys)) == len(rows)
            and all(before <= after for before, after in pairwise(rows.times))
        )

    def _new_among(self, rows: Rows) -> Rows:
        """The rows that are new, oldest first, the latest generation of each key."""
        fresh: dict[BlockKey, int] = {}
        generations, times = rows.generations, rows.times
        for row, key in enumerate(rows.keys):
            slot = self._where.get(key)
            if slot is not None:
                self._apply_known(slot, key, generations[row], rows.sizes[row], times[row])
            elif self._is_in_transit(key, generations[row]):
                if not self._is_counted(key, generations[row], times[row]):
                    self._budget.uncatalogued += rows.sizes[row]
            elif key not in fresh:
                fresh[key] = row
            else:  # two objects of one key: one is offered, the next audit finds the other
                older, newer = sorted((fresh[key], row), key=generations.__getitem__)
                fresh[key] = newer
                self._budget.uncatalogued += rows.sizes[older]
        order = sorted(fresh.values(), key=times.__getitem__)
        return Rows(
            [rows.keys[row] for row in order],
            [generations[row] for row in order],
            [rows.sizes[row] for row in order],
            [times[row] for row in order],
        )

    def _apply_known(self, slot: int, key: BlockKey, generation: int, size: int, at: float) -> None:
        """Correct size and time of a block; delete another object of the same key."""
        if self._generation.get(key, 0) == generation:
            self._budget.used += size - self._sizes[slot]
            self._sizes[slot] = size
            self._times[slot] = max(self._times[slot], at)
        elif not self._tombstones.covers(key, generation):
            copy = self._tombstones.begin(key, generation, self._outbox.now_s())
            self._delete_without_slot([copy], size)

    def _is_in_transit(self, key: BlockKey, generation: int) -> bool:
        """Whether this object is being written, read for the last time, or deleted."""
        if key in self._reserved or key in self._dropped_pinned:
            return True
        return self._tombstones.covers(key, generation)

    def _is_counted(self, key: BlockKey, generation: int, at: float) -> bool:
        """Whether the budget counts an object in transit. It does not count a younger one of
        another writer. An evicted object has the room of the block that replaces it."""
        if key in self._reserved or self._tombstones.knows(key, generation, at):
            return True
        slot = self._dropped_pinned.get(key)
        return slot is not None and at <= self._times[slot]

    def _apply_removed(self, rows: Rows) -> None:
        """Stop offering blocks that are gone, unless they have been added again since."""
        gone = []
        for key, generation, at in zip(rows.keys, rows.generations, rows.times, strict=True):
            slot = self._where.get(key)
            if (
                slot is not None
                and self._generation.get(key, 0) == generation
                and self._times[slot] <= at
            ):
                gone.append(key)
        self._losses.add(gone, Fate.ELSEWHERE)
        self._forget_deleted(gone)

    def _forget_deleted(self, keys: Sequence[BlockKey]) -> None:
        """Stop offering blocks that another server has deleted: nothing is left to record."""
        now_free: list[int] = []
        slots = [self._where.pop(key) for key in keys]
        for key, slot in zip(keys, slots, strict=True):
            self._generation.pop(key, None)
            if slot in self._pins:
                self._dropped_pinned[key] = slot
            else:
                now_free.append(slot)
        self._policy.remove(slots)
        self._release(now_free)
        self._events.add(EventKind.REMOVED, keys)

    def _drop_surplus(self) -> None:
        """Drop the coldest blocks above the budget, a limited number at each call."""
        self._surplus = min(self._surplus, self._budget.surplus())
        left = _DROPS_AT_ONCE
        while self._surplus > 0 and left > 0:
            count = min(left, max(1, self._surplus // self.slot_bytes))
            slots = self._policy.victims(count, self._pins)
            if not slots:
                self._surplus = 0
                return
            left -= len(slots)
            self._surplus -= sum(self._sizes[slot] for slot in slots)
            keys = [self._key_at(slot) for slot in slots]
            self._drop(keys)
            self._losses.add(keys, Fate.FOR_CAPACITY)
            self._stats.evicted += len(keys)

    # -- handles ---------------------------------------------------------------------------------

    def _take_handles(self, count: int) -> list[int]:
        """Slot numbers that are not in use."""
        unused = self._unused_handles
        if len(unused) < count:
            first = len(self._key_of)
            more = max(_HANDLES_MIN, min(first // 2, _HANDLES_MAX), count)
            self._key_of.extend([None] * more)
            self._sizes.extend([0] * more)
            self._times.extend([0.0] * more)
            self._policy.resize(first + more)
            unused[:0] = range(first + more - 1, first - 1, -1)
        taken = unused[len(unused) - count :]
        del unused[len(unused) - count :]
        return taken

    # -- deletes ---------------------------------------------------------------------------------

    def _start_delete(self, key: BlockKey) -> ObjectKey:
        """The object of this key, which is to be deleted."""
        generation = self._generation.pop(key, 0)
        return self._tombstones.begin(key, generation, self._outbox.now_s())

    def _delete_without_slot(self, objects: list[ObjectKey], size: int) -> None:
        """Delete objects that belong to no slot; their bytes are free afterwards."""
        [slot] = self._take_handles(1)
        self._sizes[slot] = size
        self._budget.deleting += size
        self._queue_deletes({slot: objects})

    def _queue_deletes(self, by_slot: dict[int, list[ObjectKey]]) -> None:
        """Have the keeper delete these objects, and record that afterwards."""
        self._deleting.update(by_slot)
        for slot, objects in by_slot.items():
            self._outbox.delete(slot, objects)
        if by_slot:
            self._record_removed(list(chain.from_iterable(by_slot.values())))

    def _on_deleted(self, slot: int) -> None:
        """The keeper has deleted the objects of this slot."""
        self._tombstones.end(self._deleting.pop(slot))
        self._budget.deleting -= self._sizes[slot]
        if slot in self._unrecorded:
            self._unrecorded.discard(slot)
            self._budget.settle(self._sizes[slot])
        self._sizes[slot] = 0
        self._unused_handles.append(slot)

    def _names(self, objects: Sequence[ObjectKey]) -> list[str]:
        namespace = self._namespace.id
        return [block_name(namespace, key, generation) for key, generation in objects]

    def _record_removed(self, objects: Sequence[ObjectKey]) -> None:
        self._outbox.removed([key for key, _ in objects], [gen for _, gen in objects])

    def offered(self) -> Iterator[ObjectKey]:
        """All blocks that are offered, from any thread. A block that comes or goes meanwhile may be
        among them or not."""
        where, generation, key_of = self._where, self._generation, self._key_of
        for slot in range(len(key_of)):
            key = key_of[slot]
            if key is not None and where.get(key) == slot:
                yield key, generation.get(key, 0)
