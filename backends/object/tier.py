"""The object tier: stores and loads of one namespace, answered from memory.

A block takes its full size when it is reserved. What a listing says afterwards may be less, because
blocks are compressed. The room of an evicted block is used again at once: the handler deletes its
object before it writes the new one. The room of a dropped block is free when the keeper has deleted
its object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from kvtier.backends.object.catalogue import ObjectCatalogue
from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.object_names import ObjectKey
from kvtier.backends.object.spec import ObjectSpec
from kvtier.eviction import EvictionPolicy
from kvtier.interfaces.handler import own_spec
from kvtier.record.record import HEADER_BYTES
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, Reservation, TierStats


class ObjectTier(ObjectCatalogue):
    """Blocks of one namespace below a url that any number of writers share.

    All writers may evict and drop all blocks. How much this one may store it knows from its budget,
    which the keeper agrees with all others (see `claims`).
    """

    def __init__(
        self,
        keeper: Keeper,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(keeper, policy, clock)
        self._to_delete: dict[int, list[ObjectKey]] = {}
        """By slot, the objects to delete as soon as nobody reads there."""
        self._replaced: dict[BlockKey, list[ObjectKey]] = {}
        """By reserved key, the evicted objects whose room it takes."""
        self._victims: list[ObjectKey] = []
        self._victim_bytes = 0
        self._lease_until = math.inf
        """When the claim ends under which blocks are being reserved."""

    # -- stores --------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        self._catch_up()
        self._provide_handles(len(keys))
        self._victim_bytes = 0
        dropped = self._stats.dropped
        reservation = super().prepare_store(keys, evict=evict)
        self._budget.give_back()
        taken = reservation.keys
        spec = own_spec(reservation.spec, ObjectSpec)
        spec.until = self._lease_until
        self._report_shortage(len(reservation.evicted), self._stats.dropped - dropped)
        victims, self._victims = self._victims, []
        if victims and not taken:
            self._delete_without_slot(victims, self._victim_bytes)
        elif victims:
            # an evicted object is deleted before the block that takes its room is written
            for index, victim in enumerate(victims):
                key = taken[min(index, len(taken) - 1)]
                self._replaced.setdefault(key, []).append(victim)
            spec.delete_first = [self._names(self._replaced.get(key, [])) for key in taken]
        return reservation

    def _report_shortage(self, evicted: int, dropped: int) -> None:
        """Let the keeper know if there was too little room."""
        budget = self._budget
        if dropped and not budget.alone:
            budget.note_refused(dropped * self.slot_bytes)
            self._keeper.look_soon()
        if (
            (evicted or dropped)
            and budget.cap < budget.capacity
            and 2 * budget.used < budget.capacity
        ):
            self._keeper.ask_for_room()

    def _evict(self, count: int, spared: Sequence[BlockKey]) -> list[BlockKey]:
        """Blocks differ in size: evict until there is room for `count` more. Beside other writers
        nothing is evicted: they may be evicting the very same blocks."""
        wanted = len(self._free) + count
        evicted: list[BlockKey] = []
        while (missing := self._budget.evictable(wanted) - len(self._free)) > 0:
            before = self._budget.used
            some = super()._evict(missing, spared)
            self._victim_bytes += before - self._budget.used
            if not some:
                break
            self._victims += [self._start_delete(key) for key in some]
            evicted += some
            self._provide_handles(wanted)
        return evicted

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        for key in keys:
            victims = self._replaced.pop(key, None)
            if victims is None:
                continue
            if (failed and key in failed) or key in self._unwanted:
                # the handler may have failed before it deleted them
                self._to_delete.setdefault(self._reserved[key], []).extend(victims)
            else:
                self._record_removed(victims)
                self._tombstones.end(victims)
        super().complete_store(keys, failed)

    def _provide_handles(self, count: int) -> None:
        """Have as many free handles as there is room for blocks, at most `count`."""
        count, self._lease_until = self._budget.hold(count)
        while len(self._free) > count:
            self._unused_handles.append(self._free.pop())
        self._free.extend(self._take_handles(count - len(self._free)))

    def _fail(self, key: BlockKey, outcome: Outcome) -> None:
        self._stats.corrupt += outcome is Outcome.CORRUPT
        if key not in self._where:
            return
        if outcome in (Outcome.CORRUPT, Outcome.IO_ERROR):
            self._drop([key])
            return
        if outcome is Outcome.GONE:
            # another writer may have stored it again since it was known
            known_s = self._times[self._where[key]]
            self._outbox.removed([key], [self._generation.get(key, 0)], known_s)
        size = self._sizes[self._where[key]]
        self._forget_deleted([key])
        if outcome is not Outcome.GONE:  # the store is unwell: the next audit finds the block again
            self._budget.uncatalogued += size

    # -- hooks -----------------------------------------------------------------------------------

    def _locate(self, slots: list[int]) -> LoadStoreSpec:
        key_of, generation = self._key_of, self._generation
        if not generation:
            return ObjectSpec([0] * len(slots))
        return ObjectSpec([generation.get(key_of[slot] or BlockKey(b""), 0) for slot in slots])

    def _on_reserved(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        now = self._clock()
        for slot, key in zip(slots, keys, strict=True):
            size = HEADER_BYTES + self._namespace.payload_of(key)
            self._budget.reserve(size)
            self._sizes[slot] = size
            self._times[slot] = now
            self._unrecorded.add(slot)
            if generation := self._tombstones.next_generation(key):
                self._generation[key] = generation

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._unrecorded.difference_update(slots)
        generations = [self._generation.get(key, 0) for key in keys]
        at = self._outbox.added(keys, generations, [self._sizes[slot] for slot in slots])
        for slot in slots:
            self._times[slot] = at

    def _on_dropped(self, slots: Sequence[int]) -> None:
        objects = [self._start_delete(self._key_at(slot)) for slot in slots]
        for slot, one in zip(slots, objects, strict=True):
            self._to_delete.setdefault(slot, []).append(one)
            if slot in self._pins and slot not in self._unrecorded:
                # recorded now, and deleted when the last reader has done
                self._record_removed([one])
                self._unrecorded.add(slot)
                self._budget.unsettle(self._sizes[slot])

    def _make_free(self, slots: Sequence[int]) -> None:
        deletes: dict[int, list[ObjectKey]] = {}
        for slot in slots:
            self._budget.used -= self._sizes[slot]
            objects = self._to_delete.pop(slot, None)
            if objects is None:
                self._sizes[slot] = 0
                self._unused_handles.append(slot)
            else:
                self._budget.deleting += self._sizes[slot]
                deletes[slot] = objects
        self._queue_deletes(deletes)

    def _note_uses(self, slots: Sequence[int]) -> None:
        key_of = self._key_of
        self._keeper.uses.note([key for slot in slots if (key := key_of[slot])])

    # -- beginning and end -----------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        self._catch_up()
        # In this order: the keeper tells what an audit has found before the audit is over.
        self.learning &= not self._keeper.catalogued or bool(self._keeper.updates)
        self.unwell = self._keeper.background_errors.unresolved

    def refresh(self) -> None:
        self._keeper.refresh()

    def flush(self) -> None:
        self._keeper.flush()

    def close(self) -> None:
        self._tell_policy()
        self._keeper.close()

    def stats(self) -> TierStats:
        stats = super().stats()
        stats.bytes_used = self._budget.used
        stats.bytes_capacity = self._budget.capacity
        stats.free = max(0, self._budget.cap - self._budget.used) // self.slot_bytes
        return stats
