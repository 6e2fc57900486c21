"""The reference model: what a tier does, in the plainest words that work."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from itertools import islice, product

from kvtier.backends.memory.store import MemorySpec, MemoryStore
from kvtier.core.interfaces.tier import Tier
from kvtier.core.records.tier_events import Events
from kvtier.core.retained.retained_blocks import RetainedBlocks
from kvtier.errors import NotResident
from kvtier.types import (
    BlockKey,
    EventKind,
    LoadStoreSpec,
    Outcome,
    Presence,
    Reservation,
    TierEvent,
    TierStats,
)


class MemoryTier(Tier):
    """Catalogue of a `MemoryStore`, with least-recently-used eviction.

    A key is in at most one of three places: `_reserved` (on its way in), `_resident` (a hit), or
    `_doomed` (dropped while pinned: offered to nobody, and its slot stays until the last unpin).
    """

    medium = "memory"

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self._free = list(reversed(range(store.slots)))
        self._reserved: dict[BlockKey, int] = {}
        self._resident: OrderedDict[BlockKey, int] = OrderedDict()  # coldest first
        self._doomed: dict[BlockKey, int] = {}
        self._unwanted: set[BlockKey] = set()  # reserved before a clear: to be aborted
        self._pins: Counter[BlockKey] = Counter()
        self.retained = RetainedBlocks()
        self._released: set[BlockKey] = set()
        self._events = Events()
        self._stats = TierStats(self.medium, bytes_capacity=store.slots * store.slot_bytes)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        return [self._presence(key) for key in keys]

    def _presence(self, key: BlockKey) -> Presence:
        if key in self._resident:
            return Presence.HIT
        return Presence.PENDING if key in self._reserved else Presence.MISS

    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        missing = sum(key not in self._resident for key in keys)
        if missing:
            raise NotResident(f"{missing} of {len(keys)} keys are not resident: look up first")
        self._pins.update(keys)
        return MemorySpec([self._resident[key] for key in keys])

    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        for key, outcome in (failed or {}).items():
            self._stats.corrupt += outcome is Outcome.CORRUPT
            if key in self._resident:
                self._drop([key])
        for key in keys:
            self._unpin(key)

    def _unpin(self, key: BlockKey) -> None:
        self._pins[key] -= 1
        if self._pins[key] > 0:
            return
        del self._pins[key]
        if key in self._doomed:
            self._release(self._doomed.pop(key))

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        taken: list[BlockKey] = []
        evicted: list[BlockKey] = []
        offered = set(keys)
        for key in keys:
            if key in self._resident or key in self._reserved or key in self._doomed:
                continue
            if not self._free and evict:
                # Blocks of the same request are no victims: they would take each other's place.
                evicted += self._evict_one(offered)
            if not self._free:
                self._stats.dropped += 1
                continue
            slot = self._free.pop()
            self.store.assign(slot, key)
            self._reserved[key] = slot
            taken.append(key)
        return Reservation(taken, MemorySpec([self._reserved[key] for key in taken]), evicted)

    def _evict_one(self, spared: Collection[BlockKey]) -> list[BlockKey]:
        for key in self._in_order():
            if key not in self._pins and key not in spared:
                self._drop([key])
                self._stats.evicted += 1
                return [key]
        return []

    def _in_order(self) -> Iterable[BlockKey]:
        """All that is resident: released first, then the coldest first, and last the retained."""
        if not (self._released or len(self.retained)):
            return self._resident
        ranks = product((False, True), repeat=2)
        return (
            key
            for rank in ranks
            for key in self._resident
            if (key in self.retained, key not in self._released) == rank
        )

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        committed = []
        # Backwards, so that the head of a prefix is the last of it to grow cold.
        for key in reversed(keys):
            slot = self._reserved.pop(key, None)
            if slot is None:
                continue
            if key in self._unwanted or (failed and key in failed):
                self._unwanted.discard(key)
                self._release(slot)
                self._stats.dropped += 1
                continue
            self._resident[key] = slot
            self._released.discard(key)
            committed.append(key)
        self._stats.stored += len(committed)
        self._events.add(EventKind.STORED, committed[::-1])

    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        for key in reversed(keys):
            if key in self._resident:
                self._resident.move_to_end(key)
                self._released.discard(key)

    def victims(self, count: int) -> list[BlockKey]:
        return list(islice((key for key in self._in_order() if key not in self._pins), count))

    def victims_within(self, count: int, seconds: float, chance: float) -> list[BlockKey]:
        return [key for key in self.victims(count) if key not in self.retained]

    def retain_at_most(self, blocks: int) -> None:
        self.retained.allow(blocks)

    def retain(self, keys: Sequence[BlockKey], session: str, until: float) -> int:
        return self.retained.retain(
            keys, session, until, lambda key: key in self._resident or key in self._reserved
        )

    def release(self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True) -> None:
        free = {*self.retained.release(session, None if all else keys), *keys}
        self._released |= {
            key for key in free if key in self._resident and not self.retained.wanted(key)
        }

    def retained_for(self, session: str) -> Sequence[BlockKey]:
        return self.retained.blocks_of(session)

    def tick(self) -> None:
        self.retained.expire()

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._drop([key for key in dict.fromkeys(keys) if key in self._resident])

    def clear(self) -> None:
        self._unwanted.update(self._reserved)
        self.retained.clear()
        self._drop(list(self._resident))

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            slot = self._resident.pop(key)
            self._released.discard(key)
            if key in self._pins:
                self._doomed[key] = slot
            else:
                self._release(slot)
        self._events.add(EventKind.REMOVED, keys)

    def _release(self, slot: int) -> None:
        self.store.release(slot)
        self._free.append(slot)

    def take_events(self) -> list[TierEvent]:
        return self._events.take(self.medium)

    def stats(self) -> TierStats:
        used = self.store.slots - len(self._free)
        self._stats.blocks = len(self._resident)
        self._stats.bytes_used = used * self.store.slot_bytes
        self._stats.free = len(self._free)
        self._stats.pinned = len(self._pins)
        self._stats.in_flight = len(self._reserved)
        self._stats.retained = len(self.retained)
        self._stats.retain_refused = self.retained.refused
        self._stats.released = self.retained.released
        return copy(self._stats)
