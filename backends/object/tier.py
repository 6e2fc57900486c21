"""The object tier: stores and loads of one namespace, answered from memory.

A block takes its full size when it is reserved. What a listing says afterwards may be less, because
blocks are compressed. A block that is evicted or dropped is offered no more and recorded as
removed; the caretaker deletes its object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvtier.backends.object.catalogue import ObjectCatalogue
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.spec import ObjectSpec
from kvtier.eviction import EvictionPolicy
from kvtier.eviction.retention import PINNED
from kvtier.interfaces.handler import own_spec
from kvtier.record.record import HEADER_BYTES
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, Reservation, TierStats

_RETAINED_EVERY_S = 30.0


class ObjectTier(ObjectCatalogue):
    """Blocks of one namespace below a url that any number of servers share.

    Any server may drop any block. How much this one may store it knows from its budget, which the
    caretaker grants.
    """

    def __init__(
        self,
        keeper: Keeper,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(keeper, policy, clock)
        self._until = math.inf
        """When the room ends that is being reserved."""
        self._uncommitted: set[int] = set()
        self._victims: list[str] = []
        """Names of evicted objects whose room is being reserved."""
        self._retained_at = 0.0
        keeper.spared = self.being_read

    # -- stores --------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        self._catch_up()
        self._provide_handles(len(keys))
        dropped = self._stats.dropped
        reservation = super().prepare_store(keys, evict=evict)
        spec = own_spec(reservation.spec, ObjectSpec)
        spec.until = self._until
        if self._victims and reservation.keys:
            spec.delete_first = [[] for _ in reservation.keys]
            for index, name in enumerate(self._victims):
                spec.delete_first[min(index, len(reservation.keys) - 1)].append(name)
        self._victims = []  # else the caretaker deletes them, as all that is recorded as removed
        if self._stats.dropped > dropped and not self._budget.alone:
            self._keeper.look_soon()
        return reservation

    def _evict(self, count: int, spared: Sequence[BlockKey]) -> list[BlockKey]:
        """Blocks differ in size: evict until there is room for `count` more. Beside other servers
        only the caretaker evicts."""
        wanted = len(self._free) + count
        evicted: list[BlockKey] = []
        while (missing := self._budget.evictable(wanted) - len(self._free)) > 0:
            some = super()._evict(missing, spared)
            if not some:
                break
            evicted += some
            self._provide_handles(wanted)
        return evicted

    def _provide_handles(self, count: int) -> None:
        """Have as many free handles as there is room for blocks, at most `count`."""
        count, self._until = self._budget.hold(count)
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
        slot = self._where[key]
        if outcome is Outcome.GONE:
            # another server may have stored it again since it was known
            found, known_s = (key, self._generation.get(key, 0)), self._times[slot]
            self._outbox.removed([found], known_s=known_s)
            self._tombstones.add(*found, known_s)
        else:  # the store is unwell: the block is offered again when all manifests are read anew
            self._budget.uncatalogued += self._sizes[slot]
        self._forget_removed([key])

    # -- hooks -----------------------------------------------------------------------------------

    def _locate(self, slots: list[int]) -> LoadStoreSpec:
        key_of, generation = self._key_of, self._generation
        if not generation:
            return ObjectSpec([0] * len(slots))
        return ObjectSpec([generation.get(key_of[slot] or BlockKey(b""), 0) for slot in slots])

    def _on_reserved(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            size = HEADER_BYTES + self._namespace.payload_of(key)
            self._budget.reserve(size)
            self._sizes[slot] = size
            if generation := self._tombstones.next_generation(key):
                self._generation[key] = generation
        self._uncommitted.update(slots)

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._uncommitted.difference_update(slots)
        generations = [self._generation.get(key, 0) for key in keys]
        at = self._outbox.added(keys, generations, [self._sizes[slot] for slot in slots])
        for slot in slots:
            self._times[slot] = at

    def _on_evicted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        objects = [self._remove_object(key) for key in keys]
        self._outbox.removed(objects)
        namespace = self._namespace.id
        self._victims += [block_name(namespace, *one) for one in objects]

    def _on_dropped(self, slots: Sequence[int]) -> None:
        reserved = sum(self._sizes[slot] for slot in slots if slot in self._uncommitted)
        dropped = sum(self._sizes[slot] for slot in slots)
        self._uncommitted.difference_update(slots)
        objects = [self._remove_object(self._key_at(slot)) for slot in slots]
        self._outbox.removed(objects, reserved=reserved, dropped=dropped)

    def _make_free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._budget.used -= self._sizes[slot]
            self._sizes[slot] = 0
        self._unused_handles.extend(slots)

    def _note_uses(self, slots: Sequence[int]) -> None:
        key_of = self._key_of
        self._keeper.uses.note([key for slot in slots if (key := key_of[slot])])

    # -- beginning and end -----------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        self._catch_up()
        self._tell_retained()
        # In this order: the keeper tells what it has learnt before it says that this is all.
        self.learning &= not self._keeper.catalogued or bool(self._keeper.updates)
        self.unwell = self._keeper.unwell

    def _tell_retained(self) -> None:
        """Let the keeper write down what is retained, now and then: copying it takes a while."""
        now = self._clock()
        if self.retained.changed and abs(now - self._retained_at) > _RETAINED_EVERY_S:
            self._retained_at = now
            blocks = dict.fromkeys(self.retained.blocks_of(PINNED), math.inf)
            for session in self.retained.take_all().values():
                blocks.update(session)
            self._keeper.uses.retain(blocks)

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
        stats.free = self._budget.room // self.slot_bytes
        return stats
