"""What one server knows of a namespace in an object store, and how it learns it.

What a slab tier calls a slot is only a handle here: room is counted in bytes. What other servers
did, and what the caretaker has evicted, comes as updates from the keeper. A call takes in a limited
number of them.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, KeysView, Sequence
from itertools import pairwise

from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.manifests import Rows
from kvtier.backends.object.object_names import GENERATION_MAX, ObjectKey
from kvtier.backends.object.queues import Update
from kvtier.eviction import EvictionPolicy
from kvtier.slab.catalogue import SlabTier
from kvtier.types import BlockKey, EventKind, Fate

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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[BlockKey, tuple[int, float]] = {}
        """The latest generation that was removed, and when, in seconds of the epoch."""
        self._oldest: deque[tuple[float, BlockKey]] = deque()

    def add(self, key: BlockKey, generation: int, at: float) -> None:
        self._expire()
        before = self._of.get(key, (0, 0.0))
        self._of[key] = max((generation, at), before)
        self._oldest.append((self._clock() + _TOMBSTONE_S, key))

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
        now = self._clock()
        for _ in range(_EXPIRED_AT_ONCE):
            if not self._oldest or self._oldest[0][0] > now:
                return
            self._of.pop(self._oldest.popleft()[1], None)


class ObjectCatalogue(SlabTier):
    """The blocks of one namespace below a url that any number of servers share."""

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
        """By slot, since when its object is recorded, in seconds of the epoch."""
        self._unused_handles: list[int] = []
        self._generation: dict[BlockKey, int] = {}
        """Generations that are not 0, of blocks that are resident or reserved."""
        self._tombstones = Tombstones()

    def start(self) -> None:
        """Take in all that the keeper has learnt while it was opened."""
        updates = self._keeper.updates
        while updates:
            self._apply(updates.popleft())
        self.learning = not self._keeper.catalogued
        self._events.clear()

    # -- updates ---------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        updates = self._keeper.updates
        rows = 0
        while updates and rows < _ROWS_AT_ONCE:
            update = updates[0]
            self._apply(update)
            updates.popleft()  # not earlier: until then the tier is learning
            rows += 1 + len(update.added or ()) + len(update.removed or ())

    def _apply(self, update: Update) -> None:
        # not below 0: two updates without a call of ours both report the same bytes
        self._budget.uncatalogued = max(0, self._budget.uncatalogued - update.recatalogued)
        if update.added is not None:
            self._apply_added(update.added)
        if update.removed is not None:
            self._apply_removed(update.removed)

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
            elif (
                key in self._reserved
                or key in self._dropped_pinned
                or self._tombstones.covers(key, generations[row], times[row])
            ):
                continue
            elif key not in fresh or generations[fresh[key]] <= generations[row]:
                fresh[key] = row
        order = sorted(fresh.values(), key=times.__getitem__)
        return Rows(
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

    def _apply_removed(self, rows: Rows) -> None:
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
