"""The catalogue of an object store: answers from memory, leaves all store work to its keeper.

What a slab tier calls a slot is here only a handle: room is counted in bytes. A block takes its
whole size when it is reserved, and what a listing says (it may be compressed) afterwards. The room
of an evicted block is given on at once, because the handler deletes its object before it writes
the new one; the room of a dropped block is free when the keeper has deleted it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from kvtier.backends.object.catalogue import ObjectCatalogue
from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.tombstones import Object
from kvtier.backends.object.spec import ObjectSpec
from kvtier.core.eviction import EvictionPolicy
from kvtier.core.interfaces.handler import own_spec
from kvtier.core.records.record import HEADER_BYTES
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, Reservation, TierStats


class ObjectTier(ObjectCatalogue):
    """Blocks of one namespace below a prefix that any number of writers share.

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
        self._condemned: dict[int, list[Object]] = {}
        """By slot, the objects to delete as soon as nobody reads there."""
        self._instead_of: dict[BlockKey, list[Object]] = {}
        """By reserved key, the evicted objects whose room it takes."""
        self._victims: list[Object] = []
        self._victim_bytes = 0
        self._until = math.inf
        """When the claim ends by which blocks are being reserved."""

    # -- stores --------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        self._catch_up()
        self._provide(len(keys))
        self._victim_bytes = 0
        dropped = self._stats.dropped
        reservation = super().prepare_store(keys, evict=evict)
        self._budget.give_back()
        taken = reservation.keys
        spec = own_spec(reservation.spec, ObjectSpec)
        spec.until = self._until
        self._want(len(reservation.evicted), self._stats.dropped - dropped)
        victims, self._victims = self._victims, []
        if victims and not taken:
            self._delete_apart(victims, self._victim_bytes)
        elif victims:
            # an evicted object is deleted before the block that takes its room is written
            for index, victim in enumerate(victims):
                key = taken[min(index, len(taken) - 1)]
                self._instead_of.setdefault(key, []).append(victim)
            spec.instead_of = [self._names(self._instead_of.get(key, [])) for key in taken]
        return reservation

    def _want(self, evicted: int, dropped: int) -> None:
        """Let the keeper know if there was too little room."""
        budget = self._budget
        if dropped and not budget.alone:
            budget.refused(dropped * self.slot_bytes)
            self._keeper.hurry()
        if (
            (evicted or dropped)
            and budget.cap < budget.capacity
            and 2 * budget.used < budget.capacity
        ):
            self._keeper.want_room()

    def _evict(self, count: int, spared: Sequence[BlockKey]) -> list[BlockKey]:
        """Blocks are of different sizes: evict until there is room for so many more. Beside other
        writers nothing is won by it: they may be evicting the very same blocks."""
        wanted = len(self._free) + count
        evicted: list[BlockKey] = []
        while (missing := self._budget.within_reach(wanted) - len(self._free)) > 0:
            before = self._budget.used
            some = super()._evict(missing, spared)
            self._victim_bytes += before - self._budget.used
            if not some:
                break
            self._victims += [self._leave(key) for key in some]
            evicted += some
            self._provide(wanted)
        return evicted

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        for key in keys:
            victims = self._instead_of.pop(key, None)
            if victims is None:
                continue
            if (failed and key in failed) or key in self._unwanted:
                # nobody knows whether the handler came so far as to delete them
                self._condemned.setdefault(self._reserved[key], []).extend(victims)
            else:
                self._write_removed(victims)
                self._leaving.end(victims)
        super().complete_store(keys, failed)

    def _provide(self, count: int) -> None:
        """Have as many free handles as there is room for blocks, at most `count`."""
        count, self._until = self._budget.hold(count)
        while len(self._free) > count:
            self._idle.append(self._free.pop())
        self._free.extend(self._handles(count - len(self._free)))

    def _fail(self, key: BlockKey, outcome: Outcome) -> None:
        self._stats.corrupt += outcome is Outcome.CORRUPT
        if key not in self._where:
            return
        if outcome in (Outcome.CORRUPT, Outcome.IO_ERROR):
            self._drop([key])
            return
        if outcome is Outcome.GONE:
            # but somebody may have stored it again since
            known_s = self._times[self._where[key]]
            self._outbox.removed([key], [self._generation.get(key, 0)], known_s)
        size = self._sizes[self._where[key]]
        self._lose([key])
        if outcome is not Outcome.GONE:  # weather: the next audit finds it again
            self._budget.hidden += size

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
            self._untold.add(slot)
            if generation := self._leaving.next_generation(key):
                self._generation[key] = generation

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._untold.difference_update(slots)
        generations = [self._generation.get(key, 0) for key in keys]
        at = self._outbox.added(keys, generations, [self._sizes[slot] for slot in slots])
        for slot in slots:
            self._times[slot] = at

    def _on_dropped(self, slots: Sequence[int]) -> None:
        objects = [self._leave(self._key_at(slot)) for slot in slots]
        for slot, one in zip(slots, objects, strict=True):
            self._condemned.setdefault(slot, []).append(one)
            if slot in self._pins and slot not in self._untold:
                # written down before it is deleted, which is when the last reader has done
                self._write_removed([one])
                self._untold.add(slot)
                self._budget.owe(self._sizes[slot])

    def _make_free(self, slots: Sequence[int]) -> None:
        condemned: dict[int, list[Object]] = {}
        for slot in slots:
            self._budget.used -= self._sizes[slot]
            objects = self._condemned.pop(slot, None)
            if objects is None:
                self._sizes[slot] = 0
                self._idle.append(slot)
            else:
                self._budget.dying += self._sizes[slot]
                condemned[slot] = objects
        self._delete_soon(condemned)

    def _note_uses(self, slots: Sequence[int]) -> None:
        key_of = self._key_of
        self._keeper.uses.note([key for slot in slots if (key := key_of[slot])])

    # -- the rest --------------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        self._catch_up()
        # In this order: what an audit has found was told before it was over.
        self.learning &= not self._keeper.audited or bool(self._keeper.news)
        self.unwell = self._keeper.background_errors.unsolved

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
