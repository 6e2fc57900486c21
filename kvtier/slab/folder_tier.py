"""The catalogue of a folder of slabs: answers from memory, leaves all file work to its keeper."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.chain.store import AHEAD_BLOCKS_MAX
from kvtier.eviction import EvictionPolicy
from kvtier.eviction.retention import BLOCKS_MAX
from kvtier.slab import layout
from kvtier.slab.catalogue import SlabTier
from kvtier.slab.files import SlabFile
from kvtier.slab.keeper import SlabKeeper
from kvtier.slab.numbering import Copies, Places, SlotPlace
from kvtier.slab.recovery import give_back_memory
from kvtier.slab.retention_list import RetentionFiles
from kvtier.slab.watch import SlabUpdate
from kvtier.types import BlockKey, EventKind, Fate, Outcome, TierStats


class Turns:
    """One tier is used by two threads: its own, and its keeper's, which takes updates in while the
    tier is idle."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self.mutex = threading.RLock()
        self.asked = True
        """Whether the tier was called of late."""
        self.taking = False
        """Whether the keeper takes updates in: a caller waits meanwhile, and a recent call keeps it
        from beginning, so that what a lookup has found is there a moment later."""
        self._idle_since = 0.0

    def if_idle(
        self, waits: Callable[[], object], take: Callable[[], None], then: Callable[[], None]
    ) -> None:
        """For the keeper's thread: `take` as long as something `waits` and nobody calls, and what
        comes `then`, if nobody has called for some time."""
        now = time.monotonic()
        if self.asked:
            self.asked, self._idle_since = False, now
            return
        if now - self._idle_since < self._idle_s or not self.mutex.acquire(blocking=False):
            return
        try:
            self.taking = True
            while waits() and not self.asked:
                take()
            then()
        finally:
            self.taking = False
            self.mutex.release()


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="FolderTier")

_IN_TURN = (
    *("prepare_load", "complete_load", "prepare_store", "complete_store", "touch", "tick"),
    *(
        "forget",
        "clear",
        "carry_uses",
        "victims",
        "victims_within",
        "take_events",
        "take_lost",
        "stats",
    ),
    *("take_recovered", "forget_recovered", "take_hottest", "forget_hottest"),
    *("retain_at_most", "retain", "release", "retained_for"),
)
"""Not `lookup`, which only reads, and is asked most."""


def _in_turn(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Run a method without the keeper's taking updates in meanwhile; have it stop if it does."""

    def call(tier: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        tier.turns.asked = True
        with tier.turns.mutex:
            return method(tier, *args, **kwargs)

    return functools.update_wrapper(call, method)


_AHEAD_BYTES = 1 << 30
"""Slabs are made before they are needed: with room for so much, which a burst of stores may bring,
or for as many blocks as are written down ahead of eviction, if that is more. Both would evict for
want of it. But never for more than a quarter of the capacity, so that a second engine finds some
left."""
_AHEAD_SLOTS = 1 << 14
"""At most so many slots are made ahead, more than any burst has blocks: they take memory, too."""
_UPDATE_SLOTS = 1 << 11
"""About so many entries are taken in by one call, in some two milliseconds: the death of a
neighbour may be a million."""


class FolderTier(SlabTier):
    """Slots of all slabs of a namespace, numbered through; only those of own slabs are written."""

    engine = "default"
    """The name under which the list of retained blocks is kept."""
    idle_s = 5.0
    """A tier that was not called for so long may not be called again soon: its keeper takes updates
    in itself, because neighbours wait for slabs that an idle engine holds."""

    def __init_subclass__(cls) -> None:
        for name in _IN_TURN:
            setattr(cls, name, _in_turn(getattr(cls, name)))

    def __init__(
        self,
        medium: str,
        keeper: SlabKeeper,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(medium, keeper.limits.slot_bytes, policy, clock)
        self.turns = Turns(self.idle_s)
        self._keeper = keeper
        self._retention = RetentionFiles(self.retained, keeper.folder, keeper.warn_once)
        self._places = Places(keeper.folder.aligned)
        self._copies = Copies()
        self._unwritten: set[int] = set()
        """Slots whose entries the keeper has still to write: not to be used before."""
        self._standing: dict[int, BlockKey] = {}
        """Evicted blocks whose entries still stand in slots that are given to others, as far as is
        known here: the handler will write there."""
        self._low_water = max(1, self._slots_ahead())
        self._opened = False
        self.refresh()
        self._want_room()
        self.refresh()
        self._events.clear()  # nothing of what is there at the start is news
        self._opened = True
        give_back_memory()
        self.learning = keeper.unwell
        keeper.when_idle = self._between_rounds

    # -- retained blocks -------------------------------------------------------------------

    def retain_at_most(self, blocks: int) -> None:
        super().retain_at_most(blocks)
        if blocks and not self._keeper.limits.discard:
            self._retention.begin(self.engine)
            self._keeper.at_end = functools.partial(self._retention.look, at_end=True)

    def retain_as_others(self) -> None:
        """Retain what engines of the namespace have, and what is pinned, for who fills the folder
        in their place: it has no list of its own."""
        with self.turns.mutex:
            super().retain_at_most(BLOCKS_MAX)
            self._retention.begin_as_others()

    # -- updates ---------------------------------------------------------------------------

    def _between_rounds(self) -> None:
        """In the keeper's thread: what the tier's own thread is not there to do."""
        self._retention.look()
        self.turns.if_idle(lambda: self._keeper.updates, self._take_some_in, self._events.fold)

    def _catch_up(self) -> None:
        self.turns.asked = True
        if self.turns.taking or self._keeper.updates:
            with self.turns.mutex:
                self._take_some_in()

    def _take_some_in(self) -> None:
        updates, budget = self._keeper.updates, _UPDATE_SLOTS
        while updates and budget > 0:
            budget -= self._take_in(updates.popleft())

    def _take_all_in(self) -> None:
        while self._keeper.updates:
            self._take_some_in()

    def _take_in(self, update: SlabUpdate) -> int:
        """Learn something; answers with how many entries were looked at."""
        slab = update.slab
        place = self._places.by_slab.get(slab.id)
        if update.written is not None:
            if place is not None:
                self._written([place.base + slot for slot in update.written])
            return len(update.written)
        if update.gone:
            if place is not None:
                self._lose([place], Fate.REMOVED if place.mine else Fate.ELSEWHERE)
        elif update.remove is not None:
            if place is not None and place.mine:
                self._let_go(place, remove=update.remove)
        else:
            self._see(update, place)
        return slab.header.slots if update.changes is None else len(update.changes[0])

    def _see(self, update: SlabUpdate, place: SlotPlace | None) -> None:
        """A slab is there: a new one, or one that has changed or changed hands."""
        slab, known = update.slab, place is not None
        place = place or self._number(slab)
        if place is None:
            return
        if update.table is not None:
            before = self._forget_place(place) if known else set()
            entries = layout.read_entries(update.table, slab.header.slots)
            keys = self._own_blocks(place, entries, before)
            if self._opened:
                found = {key for key in keys if self._where.get(key) in place.slots}
                gone = before.difference(self._where)
                self._events.add(EventKind.REMOVED, gone)
                self._losses.add(gone, Fate.ELSEWHERE)
                self._events.add(EventKind.STORED, found.difference(before))
            self._offer(self._copies.take(before))
        elif update.changes is not None:
            if not place.mine:
                self._see_changes(place, *update.changes)
        elif update.mine:
            self._own(place, mine=True)
            if place.mine:
                self._make_free(place.slots)

    def _own(self, place: SlotPlace, *, mine: bool) -> None:
        self._places.own(place, mine)
        self._foreign = not self._places.all_mine

    def _number(self, slab: SlabFile) -> SlotPlace | None:
        """Give numbers to a slab's slots; None if that cannot be."""
        place = self._places.add(slab, self._busy)
        new = self._places.slots - len(self._key_of)
        if new:
            self._key_of.extend([None] * new)
            self._policy.resize(len(self._key_of))
        self._foreign = True
        return place

    def _busy(self, place: SlotPlace) -> bool:
        """Whether something is on its way into a slab or out of it."""
        slots = place.slots
        return any(slot in slots for slot in self._reserved.values()) or any(
            slot in slots for slot in self._pins
        )

    def _own_blocks(
        self, place: SlotPlace, entries: npt.NDArray[np.void], before: Set[BlockKey]
    ) -> list[BlockKey]:
        """A slab of the dead is ours now, with all it holds. What is being read at the moment, and
        is no longer what it was `before`, is its readers' until the last unpin. Answers with what
        the slab holds, be it known from elsewhere, too."""
        self._own(place, mine=True)
        if not place.mine:
            return []
        base, slots = place.base, place.slots
        held = np.zeros(len(entries), bool)
        held[[slot - base for slot in self._pins if slot in slots]] = True
        bad = np.flatnonzero((entries["state"] == layout.BAD) & ~held)
        there = layout.committed(entries)
        valid, read = there[~held[there]], there[held[there]]
        used = layout.last_used(entries)
        valid = valid[np.argsort(used[valid], kind="stable")]
        keys = layout.keys_of(entries[valid])
        copies = self._adopt((valid + base).tolist(), keys, array("d", used[valid].tobytes()))
        read = read[self._still_offered((read + base).tolist(), entries[read], before)]
        valid = np.append(valid, read)
        self._survived(valid + base, used[valid], entries["uses"][valid])
        held[valid] = held[bad] = True
        self._quarantine.extend((bad + base).tolist())
        self._make_free((np.flatnonzero(~held) + base).tolist())
        self._on_dropped(copies)  # else a block that is dropped for good would come back by them
        self._make_free(copies)
        return keys

    def _still_offered(
        self, slots: Sequence[int], entries: npt.NDArray[np.void], before: Set[BlockKey]
    ) -> list[int]:
        """Offer on what is read while its slab becomes ours; answers with the rows of that."""
        keys, dropped = layout.keys_of(entries), self._dropped_pinned
        rows = [
            row
            for row, (slot, key) in enumerate(zip(slots, keys, strict=True))
            if key in before and dropped.get(key) == slot
        ]
        for key in (keys[row] for row in rows):
            self._where[key] = dropped.pop(key)
        if rows:
            self._use([slots[row] for row in rows], [keys[row] for row in rows])
        return rows

    def _see_changes(
        self, place: SlotPlace, slots: Sequence[int], keys: Sequence[BlockKey]
    ) -> None:
        """Another process's slab changed: forget what has gone, learn what is new."""
        key_of, where = self._key_of, self._where
        now = [(place.base + slot, key) for slot, key in zip(slots, keys, strict=True)]
        if self._copies:
            self._copies.take(self._copies.held_in(slot for slot, _ in now))
        gone = []
        for slot, key in now:
            old = key_of[slot]
            if old is not None and old != key and where.get(old) == slot:
                gone.append(old)
        self._drop(gone)
        self._losses.add(gone, Fate.ELSEWHERE)
        self._offer(now)

    def _offer(self, found: Iterable[tuple[int, BlockKey]]) -> None:
        """Offer what stands in others' slots, or note it until that can be."""
        key_of, where = self._key_of, self._where
        known = (where, self._reserved, self._dropped_pinned)
        fresh = []
        for slot, key in found:
            if key and key_of[slot] is None and not any(key in each for each in known):
                where[key] = slot
                key_of[slot] = key
                fresh.append(key)
            elif key and where.get(key) != slot:
                self._copies.note(slot, key)
        self._events.add(EventKind.STORED, fresh)

    def _forget_place(self, place: SlotPlace) -> set[BlockKey]:
        """Take a slab's blocks out of the catalogue without writing anything down."""
        keys = []
        for slot in place.slots:
            key = self._key_of[slot]
            if key is None or self._where.get(key) != slot:
                continue
            if slot in self._pins:
                self._dropped_pinned[key] = slot
            else:
                self._key_of[slot] = None
            keys.append(key)
            del self._where[key]
        self._policy.remove(place.slots)
        if self._copies:
            self._copies.take(self._copies.held_in(place.slots))
        return set(keys)

    def _lose(self, places: Collection[SlotPlace], fate: Fate) -> None:
        """Slabs have been removed by somebody, or their files have been."""
        of, mine = self._places.of, {place for place in places if place.mine}
        if mine:  # of others, of which thousands may go one after the other, there is nothing here
            self._unwanted.update(key for key, slot in self._reserved.items() if of(slot) in mine)
            self._drop_free(mine)
        self._foreign = True
        for place in places:
            self._places.lose(place)
            forgotten = self._forget_place(place)
            self._events.add(EventKind.REMOVED, forgotten)
            self._losses.add(forgotten, fate)
            self._offer(self._copies.take(forgotten))

    def _let_go(self, place: SlotPlace, *, remove: bool) -> None:
        """Give a slab up, unless something is on its way into it or out of it."""
        if self._busy(place):
            return
        if remove:
            self._lose([place], Fate.FOR_CAPACITY)
        else:
            self._own(place, mine=False)
            self._policy.remove(place.slots)
            self._drop_free([place])
        self._keeper.release(place.slab.id, remove=remove)

    def _drop_free(self, places: Collection[SlotPlace]) -> None:
        """Not one slab after the other: there may be thousands, and as many slots."""
        of, gone = self._places.of, set(places)
        for queue in (self._free, self._quarantine):
            kept = [slot for slot in queue if of(slot) not in gone]
            queue.clear()
            queue.extend(kept)
        self._unwritten = {slot for slot in self._unwritten if of(slot) not in gone}
        for slot in [slot for slot in self._standing if of(slot) in gone]:
            del self._standing[slot]

    # -- hooks -----------------------------------------------------------------------------

    def _slot_count(self) -> int:
        return self._places.all_slots

    def _owned(self, slot: int) -> bool:
        return self._places.of(slot).mine

    def _on_reserved(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._want_room()

    def _slots_ahead(self) -> int:
        """How many slots are to be free."""
        limits = self._keeper.limits
        burst = max(_AHEAD_BYTES, AHEAD_BLOCKS_MAX * limits.slot_bytes)
        ahead = max(limits.slab_bytes, min(limits.capacity // 4, burst))
        return min(ahead // limits.slot_bytes, _AHEAD_SLOTS)

    def _want_room(self) -> None:
        """Have more slabs made before they are needed: that takes longer than a request waits."""
        missing = self._low_water - len(self._free)
        if missing > 0:
            self._keeper.want_room(missing)

    def _on_dropped(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._record(slot, layout.FREE, BlockKey(b""))

    def _on_evicted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._standing.update(zip(slots, keys, strict=True))

    def _on_quarantined(self, slot: int, key: BlockKey) -> None:
        self._record(slot, layout.BAD, key)

    def _note_uses(self, slots: Sequence[int]) -> None:
        self._keeper.uses.note(self._places.where(slots))

    def _on_carried(self, used: Mapping[int, tuple[int, int]]) -> None:
        self._keeper.uses.carry(dict(zip(self._places.where(used), used.values(), strict=True)))

    def _record(self, slot: int, state: int, key: BlockKey) -> None:
        place = self._places.of(slot)
        if place.mine:
            self._unwritten.add(slot)
            self._keeper.record(place.slab.id, slot - place.base, state, key)

    def _release(self, slots: Sequence[int]) -> None:
        if not self._copies:
            super()._release(slots)
            return
        keys = [key for slot in slots if (key := self._key_of[slot])]
        keys += self._copies.held_in(slots)
        super()._release(slots)
        self._offer(self._copies.take(keys))

    def _make_free(self, slots: Sequence[int]) -> None:
        if self._unwritten:
            slots = [slot for slot in slots if slot not in self._unwritten]
        super()._make_free(slots)

    def _written(self, slots: Sequence[int]) -> None:
        """Slots whose entries are written; those that nobody holds are free from now on."""
        written = [slot for slot in slots if slot in self._unwritten]
        self._unwritten.difference_update(written)
        held = self._pins.keys() | set(self._quarantine)
        super()._make_free([slot for slot in written if slot not in held])

    # -- the rest --------------------------------------------------------------------------

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        for key in keys if self._standing else ():
            self._standing.pop(self._reserved.get(key, -1), None)
        super().complete_store(keys, failed)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._copies.take(keys)
        super().forget(keys)
        dropped = set(keys) if self._standing else ()
        for slot in [slot for slot, key in self._standing.items() if key in dropped]:
            place, key = self._places.of(slot), self._standing.pop(slot)
            self._keeper.hide(place.slab.id, slot - place.base, key)

    def clear(self) -> None:
        """Own slabs are given up whole, so that not even what was evicted can be found again."""
        self._take_all_in()
        self._copies.clear()
        self._give_up_slabs()
        super().clear()
        self._want_room()

    def _give_up_slabs(self) -> None:
        mine = [place for place in self._places.by_slab.values() if place.mine]
        self._lose(mine, Fate.REMOVED)
        for place in mine:
            self._keeper.release(place.slab.id, remove=True)

    def tick(self) -> None:
        super().tick()
        if self._retention.take_pins():
            self._let_go_of_ended()
        self._catch_up()
        self.unwell = self._keeper.unwell
        self.learning &= self.unwell or bool(self._keeper.updates)

    def refresh(self) -> None:
        with self.turns.mutex:
            self._take_all_in()
        self._keeper.work(thorough=True)
        with self.turns.mutex:
            self._take_all_in()
        self._keeper.flush()

    def flush(self) -> None:
        self._keeper.flush()

    def stats(self) -> TierStats:
        stats = super().stats()
        stats.bytes_capacity = self._keeper.limits.capacity
        return stats

    def close(self) -> None:
        self._keeper.close()
