"""The object tier: stores and loads of one namespace, answered from memory.

A block takes its full size when it is reserved. What a listing says afterwards may be less, because
blocks are compressed. A block that is evicted or dropped is offered no more and recorded as
removed; the caretaker deletes its object.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, KeysView, Sequence
from itertools import pairwise

from kvtier.backends.object.handler import ObjectSpec
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.manifests import ADDED
from kvtier.backends.object.object_names import GENERATION_MAX, ObjectKey, block_name
from kvtier.backends.object.queues import Update
from kvtier.eviction import EvictionPolicy
from kvtier.eviction.retention import PINNED
from kvtier.interfaces.handler import own_spec
from kvtier.record.record import HEADER_BYTES
from kvtier.slab.catalogue import SlabTier
from kvtier.types import BlockKey, EventKind, Fate, LoadStoreSpec, Outcome, Reservation, TierStats

_RETAINED_EVERY_S = 30.0
_ROWS_AT_ONCE = 512
"""So many updated blocks are taken in by one call."""
_HANDLES_MIN = 1024
_HANDLES_MAX = 1 << 14
"""More new handles at once, beside millions, would keep a request waiting."""
_TOMBSTONE_S = 3600.0
_EXPIRED_AT_ONCE = 64


class Tombstones:
    """Objects that were removed lately. Until their deletion is long over the next object of the
    same block gets a later generation, and so another name: a late delete never hits it."""

    def __init__(self) -> None:
        self._of: dict[BlockKey, tuple[int, float]] = {}
        """The latest generation that was removed, and when, in seconds of the epoch."""
        self._oldest: deque[tuple[float, BlockKey]] = deque()

    def add(self, key: BlockKey, generation: int, at: float) -> None:
        self._expire()
        before = self._of.get(key, (0, 0.0))
        self._of[key] = max((generation, at), before)
        self._oldest.append((time.monotonic() + _TOMBSTONE_S, key))

    def covers(self, key: BlockKey, generation: int, at: float) -> bool:
        """Whether this object, which was recorded at a time, has been removed since, or is older
        than one that was."""
        latest = self._of.get(key)
        return latest is not None and generation <= latest[0] and at <= latest[1]

    def next_generation(self, key: BlockKey) -> int:
        """The generation of the next object of this key."""
        latest = self._of.get(key)
        return 0 if latest is None else (latest[0] + 1) % GENERATION_MAX

    def keys(self) -> KeysView[BlockKey]:
        """A live view: a copy of millions of keys, after a reset, would take long."""
        return self._of.keys()

    def _expire(self) -> None:
        now = time.monotonic()
        for _ in range(_EXPIRED_AT_ONCE):
            if not self._oldest or self._oldest[0][0] > now:
                return
            self._of.pop(self._oldest.popleft()[1], None)


class ObjectTier(SlabTier):
    """Blocks of one namespace below a url that any number of servers share.

    Any server may drop any block. How much this one may store it knows from its budget, which the
    caretaker grants. What a slab tier calls a slot is only a handle here: room is counted in bytes.
    What other servers did, and what the caretaker has evicted, comes as updates from the keeper. A
    call takes in a limited number of them.
    """

    def __init__(
        self,
        keeper: Keeper,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._namespace = keeper.namespace
        super().__init__("object", keeper.block_bytes, policy, clock)
        self._keeper = keeper
        self._outbox = keeper.outbox
        self._budget = keeper.budget
        self._sizes = array("q")
        self._times = array("d")
        """By slot, since when its object is recorded, in seconds of the epoch."""
        self._unused_handles: list[int] = []
        self._generation: dict[BlockKey, int] = {}
        """Generations that are not 0, of blocks that are resident or reserved."""
        self._tombstones = Tombstones()
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
        if outcome is not Outcome.GONE:
            self._drop([key])
            return
        # another server may have stored it again since it was known
        found, known_s = (key, self._generation.get(key, 0)), self._times[self._where[key]]
        self._outbox.removed([found], known_s=known_s)
        self._tombstones.add(*found, known_s)
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

    # -- updates ---------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        updates = self._keeper.updates
        rows = 0
        while updates and rows < _ROWS_AT_ONCE:
            update = updates[0]
            self._apply(update)
            updates.popleft()  # not earlier: until then the tier is learning
            rows += len(update)

    def _apply(self, update: Update) -> None:
        (self._apply_added if update.kind == ADDED else self._apply_removed)(update)

    def _apply_added(self, rows: Update) -> None:
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

    def _all_new(self, rows: Update) -> bool:
        """Whether these rows can be taken as they are, which is so when a tier is opened."""
        tables = (self._where, self._reserved, self._dropped_pinned, self._tombstones)
        return (
            all(table.keys().isdisjoint(rows.keys) for table in tables)
            and len(set(rows.keys)) == len(rows)
            and all(before <= after for before, after in pairwise(rows.times))
        )

    def _new_among(self, rows: Update) -> Update:
        """The rows that are new, oldest first, the latest generation of each key."""
        fresh: dict[BlockKey, int] = {}
        generations, times = rows.generations, rows.times
        for row, key in enumerate(rows.keys):
            slot = self._where.get(key)
            if slot is not None:
                self._apply_known(slot, key, generations[row], rows.sizes[row], times[row])
            elif (
                key in self._reserved
                or key in self._dropped_pinned
                or self._tombstones.covers(key, generations[row], times[row])
            ):
                continue
            elif key not in fresh or generations[fresh[key]] <= generations[row]:
                fresh[key] = row
        order = sorted(fresh.values(), key=times.__getitem__)
        return Update(
            ADDED,
            [rows.keys[row] for row in order],
            [generations[row] for row in order],
            [rows.sizes[row] for row in order],
            [times[row] for row in order],
        )

    def _apply_known(self, slot: int, key: BlockKey, generation: int, size: int, at: float) -> None:
        """Correct size and time of a block. Of several objects of it the latest one stays."""
        mine = self._generation.get(key, 0)
        if generation < mine or (slot in self._pins and generation != mine):
            return
        if generation > mine:
            self._generation[key] = generation
        self._budget.used += size - self._sizes[slot]
        self._sizes[slot] = size
        self._times[slot] = max(self._times[slot], at)

    def _apply_removed(self, rows: Update) -> None:
        """Stop offering blocks that are gone, unless they have been added again since."""
        gone = []
        for key, generation, at in zip(rows.keys, rows.generations, rows.times, strict=True):
            self._tombstones.add(key, generation, at)
            slot = self._where.get(key)
            if (
                slot is not None
                and self._generation.get(key, 0) == generation
                and self._times[slot] <= at
            ):
                gone.append(key)
        self._losses.add(gone, Fate.ELSEWHERE)
        self._forget_removed(gone)

    def _forget_removed(self, keys: Sequence[BlockKey]) -> None:
        """Stop offering blocks whose removal is recorded."""
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

    # -- handles and objects -----------------------------------------------------------------------

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

    def _remove_object(self, key: BlockKey) -> ObjectKey:
        """The object of this key, whose removal is to be recorded."""
        generation = self._generation.pop(key, 0)
        self._tombstones.add(key, generation, self._outbox.now_us() / 1e6)
        return key, generation

    def offered(self) -> Iterator[ObjectKey]:
        """All blocks that are offered, from any thread. A block that comes or goes meanwhile may be
        among them or not."""
        where, generation, key_of = self._where, self._generation, self._key_of
        for slot in range(len(key_of)):
            key = key_of[slot]
            if key is not None and where.get(key) == slot:
                yield key, generation.get(key, 0)

    def being_read(self) -> list[BlockKey]:
        """Blocks that are pinned, from any thread."""
        key_of = self._key_of
        return [key for slot in list(self._pins) if (key := key_of[slot]) is not None]

    # -- beginning and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Take in all that the keeper has learnt while it was opened."""
        updates = self._keeper.updates
        while updates:
            self._apply(updates.popleft())
        self.learning = not self._keeper.catalogued
        self._events.clear()

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
