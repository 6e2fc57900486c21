"""What a writer knows of a namespace in an object store, and how it learns it.

What a slab tier calls a slot is here only a handle: room is counted in bytes. All that others did,
and what the keeper has deleted, comes as news from the keeper, and is taken in a little at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.tombstones import Object, Tombstones
from kvtier.backends.object.housekeeping.updates import Rows, Updates
from kvtier.backends.object.object_names import block_name
from kvtier.core.eviction import EvictionPolicy
from kvtier.core.slab.tier import SlabTier
from kvtier.types import BlockKey, EventKind

_ROWS_AT_ONCE = 512
"""So much news is taken in by one call: long work is spread over many."""
_DROPS_AT_ONCE = 128
_HANDLES_MIN = 1024
_HANDLES_MAX = 1 << 14
"""More at once, of millions, would keep a request waiting."""


class ObjectCatalogue(SlabTier):
    """The blocks of one namespace below a prefix that any number of writers share."""

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
        self._idle: list[int] = []
        self._generation: dict[BlockKey, int] = {}
        """Generations that are not 0, of blocks that are resident, reserved or doomed."""
        self._leaving = Tombstones()
        self._deleting: dict[int, list[Object]] = {}
        """By slot, the objects that the keeper is deleting."""
        self._untold: set[int] = set()
        """Slots whose bytes no manifest tells of, until they are committed or deleted."""
        self._surplus = 0
        """Bytes that are still to be dropped to keep the budget."""

    def start(self) -> None:
        """Take in what the keeper has learnt while it was opened."""
        news = self._keeper.news
        while news:
            self._take_in(news[0])
            news.popleft()
        while self._surplus > 0:
            self._shrink()
        self.learning = not self._keeper.audited
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
        if self._surplus > 0:
            self._shrink()

    def _take_in(self, news: Updates) -> None:
        # no more than there is: of two audits without a call of ours both tell of the same bytes
        self._budget.hidden = max(0, self._budget.hidden - news.unhidden)
        if news.added is not None:
            self._take_added(news.added)
        if news.removed is not None:
            self._take_removed(news.removed)
        for slot in news.freed:
            self._freed(slot)
        if news.standing is not None:
            self._budget.hear(news.standing)
            self._surplus = self._budget.surplus()

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
        self._events.add(EventKind.STORED, rows.keys)

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
                    copy = self._leaving.begin(key, generations[row], self._outbox.now_s())
                    self._delete_apart([copy], rows.sizes[row])
            elif self._on_its_way(key, generations[row]):
                if not self._is_counted(key, generations[row], times[row]):
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
        self._delete_soon({slot: objects})

    def _on_its_way(self, key: BlockKey, generation: int) -> bool:
        """Whether this object is one that is being written, read for the last time, or deleted."""
        if key in self._reserved or key in self._doomed:
            return True
        return self._leaving.covers(key, generation)

    def _is_counted(self, key: BlockKey, generation: int, at: float) -> bool:
        """Whether an object on its way has its room, and is not somebody else's younger one. What
        is evicted has that of the block that is written in its place."""
        if key in self._reserved or self._leaving.knows(key, generation, at):
            return True
        slot = self._doomed.get(key)
        return slot is not None and at <= self._times[slot]

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
        self._events.add(EventKind.REMOVED, keys)

    def _shrink(self) -> None:
        """Drop the coldest blocks while there is more than the budget, some at each call."""
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
            self._stats.evicted += len(keys)

    # -- handles and bytes -------------------------------------------------------------------

    def _handles(self, count: int) -> list[int]:
        """Slot numbers that nobody uses."""
        idle = self._idle
        if len(idle) < count:
            first = len(self._key_of)
            more = max(_HANDLES_MIN, min(first // 2, _HANDLES_MAX), count)
            self._key_of.extend([None] * more)
            self._sizes.extend([0] * more)
            self._times.extend([0.0] * more)
            self._policy.resize(first + more)
            idle[:0] = range(first + more - 1, first - 1, -1)
        taken = idle[len(idle) - count :]
        del idle[len(idle) - count :]
        return taken

    def _resize(self, slot: int, size: int) -> None:
        self._budget.used += size - self._sizes[slot]
        self._sizes[slot] = size

    # -- objects that go -------------------------------------------------------------------------

    def _leave(self, key: BlockKey) -> Object:
        """This key's object is to be deleted."""
        generation = self._generation.pop(key, 0)
        return self._leaving.begin(key, generation, self._outbox.now_s())

    def _delete_soon(self, condemned: dict[int, list[Object]]) -> None:
        """Delete the objects of these slots, and have that written down afterwards."""
        self._deleting.update(condemned)
        for slot, objects in condemned.items():
            self._outbox.delete(slot, objects)
        if condemned:
            self._write_removed(list(chain.from_iterable(condemned.values())))

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
        self._outbox.removed([key for key, _ in objects], [gen for _, gen in objects])

    def known(self) -> Iterator[tuple[BlockKey, int]]:
        """All offered keys and their generations, one after the other, from any thread: what comes
        or goes in the meantime may be among them or not."""
        where, generation, key_of = self._where, self._generation, self._key_of
        for slot in range(len(key_of)):
            key = key_of[slot]
            if key is not None and where.get(key) == slot:
                yield key, generation.get(key, 0)
