"""The catalogue of an object store: answers from memory, leaves all store work to its keeper.

What a slab tier calls a slot is here only a handle: room is counted in bytes. A block takes its
whole size when it is reserved, and what a listing says (it may be compressed) afterwards. The room
of an evicted block is given on at once, because the handler deletes its object before it writes
the new one; the room of a dropped block is free when the keeper has deleted it.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import pairwise

from kvtier.backends.object.keeper import Keeper, News, Rows
from kvtier.backends.object.leaving import Leaving, Object
from kvtier.backends.object.names import block_name
from kvtier.backends.object.spec import ObjectSpec
from kvtier.core.eviction import EvictionPolicy
from kvtier.core.record import HEADER_BYTES
from kvtier.core.slab.tier import SlabTier
from kvtier.types import BlockKey, EventKind, LoadStoreSpec, Outcome, Reservation, TierStats

_ROWS_AT_ONCE = 512
"""So much news is taken in by one call: long work is spread over many."""
_HANDLES_MIN = 1024


class ObjectTier(SlabTier):
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
        self._namespace = keeper.namespace
        super().__init__("object", keeper.block_bytes, policy, clock)
        self._keeper = keeper
        self._budget = keeper.budget
        self._sizes = array("q")
        self._times = array("d")
        self._idle: list[int] = []
        self._generation: dict[BlockKey, int] = {}
        """Generations that are not 0, of blocks that are resident, reserved or doomed."""
        self._leaving = Leaving()
        self._condemned: dict[int, list[Object]] = {}
        """By slot, the objects to delete as soon as nobody reads there."""
        self._deleting: dict[int, list[Object]] = {}
        """By slot, the objects that the keeper is deleting."""
        self._instead_of: dict[BlockKey, list[Object]] = {}
        """By reserved key, the evicted objects whose room it takes."""
        self._victims: list[Object] = []
        self._victim_bytes = 0
        self._until = math.inf
        """When the claim ends by which blocks are being reserved."""
        self._untold: set[int] = set()
        """Slots whose bytes no manifest tells of, until they are committed or deleted."""

    def start(self) -> None:
        """Take in what the keeper has learnt while it was opened."""
        news = self._keeper.news
        while news:
            self._take_in(news[0])
            news.popleft()
        self._events.clear()

    # -- news --------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        news = self._keeper.news
        rows = 0
        while news and rows < _ROWS_AT_ONCE:
            piece = news[0]
            self._take_in(piece)
            news.popleft()  # not before: until then the keeper takes it for unknown
            rows += 1 + len(piece.added or ()) + len(piece.removed or ()) + len(piece.freed)

    def _take_in(self, news: News) -> None:
        self._budget.hidden -= news.unhidden
        if news.added is not None:
            self._take_added(news.added)
        if news.removed is not None:
            self._take_removed(news.removed)
        for slot in news.freed:
            self._freed(slot)
        if news.standing is not None:
            self._budget.hear(news.standing)
            self._shrink()

    def _take_added(self, rows: Rows) -> None:
        """Offer what is new; of what is known, correct the size."""
        if not self._all_new(rows):
            rows = self._new_among(rows)
        slots = self._handles(len(rows))
        for slot, size, at in zip(slots, rows.sizes, rows.times, strict=True):
            self._sizes[slot] = size
            self._times[slot] = at
        self._budget.used += sum(rows.sizes)
        if any(rows.generations):
            found = zip(rows.keys, rows.generations, strict=True)
            self._generation.update({key: generation for key, generation in found if generation})
        self._adopt(slots, rows.keys, rows.times)
        self._announce(EventKind.STORED, rows.keys)

    def _all_new(self, rows: Rows) -> bool:
        """Whether these rows can be taken as they are: so it is when a tier is opened."""
        tables = (self._where, self._reserved, self._doomed, self._leaving)
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
                if self._generation.get(key, 0) == generations[row]:
                    self._resize(slot, rows.sizes[row])
                    self._times[slot] = max(self._times[slot], times[row])
                elif not self._leaving.covers(key, generations[row]):
                    copy = self._leaving.begin(key, generations[row])
                    self._delete_apart([copy], rows.sizes[row])
            elif self._on_its_way(key, generations[row]):
                if key not in self._reserved:  # perhaps somebody else's, younger than ours
                    self._budget.hidden += rows.sizes[row]
            elif key not in fresh:
                fresh[key] = row
            else:  # two objects of one key: one is offered, the next audit finds the other
                older, newer = sorted((fresh[key], row), key=generations.__getitem__)
                fresh[key] = newer
                self._budget.hidden += rows.sizes[older]
        order = sorted(fresh.values(), key=times.__getitem__)
        return Rows(
            [rows.keys[row] for row in order],
            [generations[row] for row in order],
            [rows.sizes[row] for row in order],
            [times[row] for row in order],
        )

    def _delete_apart(self, objects: list[Object], size: int) -> None:
        """Delete objects that belong to no slot: what is counted as theirs is free afterwards."""
        [slot] = self._handles(1)
        self._sizes[slot] = size
        self._budget.dying += size
        self._delete_soon(slot, objects)

    def _on_its_way(self, key: BlockKey, generation: int) -> bool:
        """Whether this object is one that is being written, read for the last time, or deleted."""
        if key in self._reserved or key in self._doomed:
            return True
        return self._leaving.covers(key, generation)

    def _take_removed(self, rows: Rows) -> None:
        """Stop offering what is gone, unless it has been added again since."""
        gone = []
        for key, generation, at in zip(rows.keys, rows.generations, rows.times, strict=True):
            slot = self._where.get(key)
            if (
                slot is not None
                and self._generation.get(key, 0) == generation
                and self._times[slot] <= at
            ):
                gone.append(key)
        self._lose(gone)

    def _lose(self, keys: Sequence[BlockKey]) -> None:
        """Somebody else has deleted these blocks: nothing is left to be written down."""
        now_free: list[int] = []
        slots = [self._where.pop(key) for key in keys]
        for key, slot in zip(keys, slots, strict=True):
            self._generation.pop(key, None)
            if slot in self._pins:
                self._doomed[key] = slot
            else:
                now_free.append(slot)
        self._policy.remove(slots)
        self._release(now_free)
        self._announce(EventKind.REMOVED, keys)

    def _shrink(self) -> None:
        """Drop the coldest blocks while there is more than the budget."""
        over = self._budget.surplus()
        while over > 0:
            count = max(1, over // self.slot_bytes)
            slots = self._policy.victims(count, self._pins)
            if not slots:
                return
            over -= sum(self._sizes[slot] for slot in slots)
            keys = [self._key_at(slot) for slot in slots]
            self._drop(keys)
            self._stats.evicted += len(keys)

    # -- handles and bytes -------------------------------------------------------------------

    def _handles(self, count: int) -> list[int]:
        """Slot numbers that nobody uses."""
        idle = self._idle
        if len(idle) < count:
            first = len(self._key_of)
            more = max(_HANDLES_MIN, first // 2, count)
            self._key_of.extend([None] * more)
            self._sizes.extend([0] * more)
            self._times.extend([0.0] * more)
            self._policy.resize(first + more)
            idle[:0] = range(first + more - 1, first - 1, -1)
        taken = idle[len(idle) - count :]
        del idle[len(idle) - count :]
        return taken

    def _hold(self, key: BlockKey, slot: int, generation: int, size: int, at: float) -> None:
        self._budget.reserve(size)
        self._sizes[slot] = size
        self._times[slot] = at
        if generation:
            self._generation[key] = generation
        else:
            self._generation.pop(key, None)

    def _resize(self, slot: int, size: int) -> None:
        self._budget.used += size - self._sizes[slot]
        self._sizes[slot] = size

    def _provide(self, count: int) -> None:
        """Have as many free handles as there is room for blocks, at most `count`."""
        count, self._until = self._budget.hold(count)
        while len(self._free) > count:
            self._idle.append(self._free.pop())
        self._free.extend(self._handles(count - len(self._free)))

    # -- stores --------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        self._catch_up()
        self._provide(len(keys))
        self._victim_bytes = 0
        dropped = self._stats.dropped
        reservation = super().prepare_store(keys, evict=evict)
        self._budget.give_back()
        taken = reservation.keys
        assert isinstance(reservation.spec, ObjectSpec)
        reservation.spec.until = self._until
        self._want(len(reservation.evicted), self._stats.dropped - dropped)
        victims, self._victims = self._victims, []
        if victims and not taken:
            self._delete_apart(victims, self._victim_bytes)
        elif victims:
            # an evicted object is deleted before the block that takes its room is written
            for index, victim in enumerate(victims):
                key = taken[min(index, len(taken) - 1)]
                self._instead_of.setdefault(key, []).append(victim)
            names = [self._names(self._instead_of.get(key, [])) for key in taken]
            reservation.spec.instead_of = names
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
        if not self._budget.alone:
            return []
        wanted = len(self._free) + count
        evicted: list[BlockKey] = []
        while self._budget.alone and len(self._free) < wanted:
            before = self._budget.used
            some = super()._evict(wanted - len(self._free), spared)
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

    # -- objects that go -------------------------------------------------------------------------

    def _leave(self, key: BlockKey) -> Object:
        """This key's object is to be deleted."""
        return self._leaving.begin(key, self._generation.pop(key, 0))

    def _delete_soon(self, slot: int, objects: list[Object]) -> None:
        self._deleting[slot] = objects
        self._keeper.delete(slot, self._names(objects))
        self._write_removed(objects)

    def _freed(self, slot: int) -> None:
        """The keeper has deleted what it was told to delete for this slot."""
        self._leaving.end(self._deleting.pop(slot))
        self._budget.dying -= self._sizes[slot]
        if slot in self._untold:
            self._untold.discard(slot)
            self._budget.settle(self._sizes[slot])
        self._sizes[slot] = 0
        self._idle.append(slot)

    def _names(self, objects: Sequence[Object]) -> list[str]:
        namespace = self._namespace.id
        return [block_name(namespace, key, generation) for key, generation in objects]

    def _write_removed(self, objects: Sequence[Object]) -> None:
        self._keeper.removed([key for key, _ in objects], [gen for _, gen in objects])

    def _fail(self, key: BlockKey, outcome: Outcome) -> None:
        if outcome is Outcome.CORRUPT:
            self._stats.corrupt += 1
        elif outcome is Outcome.GONE:
            self._stats.gone += 1
        else:
            self._stats.io_errors += 1
        if key not in self._where:
            return
        if outcome in (Outcome.CORRUPT, Outcome.IO_ERROR):
            self._drop([key])
            return
        if outcome is Outcome.GONE:
            # but somebody may have stored it again since
            known_s = self._times[self._where[key]]
            self._keeper.removed([key], [self._generation.get(key, 0)], known_s)
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
            generation = self._leaving.next_generation(key)
            size = HEADER_BYTES + self._namespace.payload_of(key)
            self._hold(key, slot, generation, size, now)
            self._untold.add(slot)

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._untold.difference_update(slots)
        generations = [self._generation.get(key, 0) for key in keys]
        at = self._keeper.added(keys, generations, [self._sizes[slot] for slot in slots])
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
        for slot in slots:
            self._budget.used -= self._sizes[slot]
            objects = self._condemned.pop(slot, None)
            if objects is None:
                self._sizes[slot] = 0
                self._idle.append(slot)
            else:
                self._budget.dying += self._sizes[slot]
                self._delete_soon(slot, objects)

    # -- the rest --------------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        self._catch_up()

    def refresh(self) -> None:
        self._keeper.refresh()

    def flush(self) -> None:
        self._keeper.flush()

    def close(self) -> None:
        self._keeper.close()

    def generations(self) -> dict[BlockKey, int]:
        """All offered keys and their generations; may be called from any thread."""
        found = dict.fromkeys(list(self._where), 0)
        for key, generation in list(self._generation.items()):
            if key in found:
                found[key] = generation
        return found

    def stats(self) -> TierStats:
        stats = super().stats()
        stats.bytes_used = self._budget.used
        stats.bytes_capacity = self._budget.capacity
        return copy(stats)
