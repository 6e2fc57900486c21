"""The memory tier: a plain model of what every tier does, and a real tier in one process."""

from __future__ import annotations

import mmap
import os
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import islice, product
from typing import ClassVar
from weakref import WeakValueDictionary

import msgspec

from kvtier.errors import ConfigError, MediumError, NotResident
from kvtier.eviction.retention import RetainedBlocks
from kvtier.inspect import Filling, Inspector, InspectorContext, Reach
from kvtier.inspect.contents import Depth
from kvtier.inspect.filling import TAKE_ALL
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.interfaces.handler import HostHandler, own_spec
from kvtier.interfaces.tier import Events, Tier
from kvtier.record.record import Buffer, record_bytes
from kvtier.settings import ByteSize, Capacity, TierSettings, check_capacity
from kvtier.types import (
    BlockKey,
    EventKind,
    LoadStoreSpec,
    Namespace,
    Outcome,
    Presence,
    Reservation,
    SlotSpec,
    TierEvent,
    TierStats,
)


class MemorySettings(TierSettings, frozen=True, kw_only=True, tag="memory"):
    """Blocks in the memory of one process: the reference that the other tiers are held against."""

    name: str = "memory"
    """Tells apart two tiers of this kind in one stack."""
    eviction: str = "lru"


# The medium itself: aligned slots in anonymous memory, and who owns which.


class MemorySpec(SlotSpec, tag="memory"):
    """Slots of a `MemoryStore`."""

    medium: ClassVar[str] = "memory"


class MemoryStore:
    """Slots that the tier hands out and the handler fills."""

    def __init__(self, namespace: Namespace, capacity: int) -> None:
        self.slot_bytes = record_bytes(namespace.payload_bytes)
        self.slots = capacity // self.slot_bytes
        if self.slots == 0:
            raise MediumError(
                f"a memory tier of {capacity} bytes holds not one block of {self.slot_bytes}: "
                "raise its capacity"
            )
        try:
            self._region = mmap.mmap(
                -1, self.slots * self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise MediumError(
                f"no {self.slots * self.slot_bytes} bytes of memory ({error.strerror}): "
                "lower the memory tier's capacity"
            ) from error
        self._bytes = memoryview(self._region)
        self.owners: dict[int, BlockKey] = {}
        """Whose record a slot holds or is about to hold; written by the tier alone."""
        self.landed: dict[int, Outcome] = {}
        """How the transfer into a slot ended; forgotten when the slot changes hands."""

    def assign(self, slot: int, key: BlockKey) -> None:
        """The slot is this key's from now on; nothing has landed in it yet."""
        self.landed.pop(slot, None)
        self.owners[slot] = key

    def release(self, slot: int) -> None:
        """The slot is nobody's from now on."""
        self.landed.pop(slot, None)
        del self.owners[slot]

    def record(self, slot: int) -> Buffer:
        """The slot's bytes, in place."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"no slot {slot} in a memory tier of {self.slots}")
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


# The reference model: what a tier does, in the plainest words that work.


class MemoryTier(Tier):
    """Catalogue of a `MemoryStore`, with least-recently-used eviction.

    A key is in at most one of three places: `_reserved` (on its way in), `_resident` (a hit), or
    `_doomed` (dropped while pinned: offered to nobody, and its slot stays until the last unpin).
    """

    medium = "memory"
    shared = False

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


# Moves records in and out of the store's slots, or lets others do so in place.


class MemoryHandler(HostHandler):
    """The store's slots are host memory: `views` gives them, `load` and `store` copy them."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, buffer in zip(own_spec(spec, MemorySpec).slots, keys, into, strict=True):
            if self._store.owners.get(slot) != key:
                outcomes.append(Outcome.GONE)
                continue
            record = self._store.record(slot)
            buffer[: len(record)] = record
            outcomes.append(Outcome.OK)
        return outcomes

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, record in zip(own_spec(spec, MemorySpec).slots, keys, records, strict=True):
            if self._store.owners.get(slot) != key:
                outcomes.append(Outcome.GONE)
                continue
            self._store.record(slot)[: len(record)] = record
            outcomes.append(Outcome.OK)
        return outcomes

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        return [self._store.record(slot) for slot in own_spec(spec, MemorySpec).slots]

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        self._store.landed[own_spec(spec, MemorySpec).slots[index]] = outcome


# What is to be known from outside of memory that is one process's own: nothing.


class MemoryInspector(Inspector[MemorySettings]):
    """There is nothing to see, to mend or to remove, and that is no trouble."""

    reach = Reach.HOST

    def where(self) -> str:
        return "memory of each process"

    def _look(self, depth: Depth, uses_of: str | None) -> None:
        """It stays unseen."""

    @contextmanager
    def measuring_place(self, room: int) -> Iterator[MemorySettings]:
        """Memory that every process has anew."""
        if self.tier:
            yield msgspec.structs.replace(self.settings, **TAKE_ALL)
        else:
            yield msgspec.structs.replace(self.settings, capacity=Capacity(ByteSize(room)))

    def filling(self) -> Filling[MemorySettings]:
        return MemoryFilling(self.opener, self.settings, self.context, self.capacity())


class MemoryFilling(Filling[MemorySettings]):
    """Nothing of it would be left."""

    def keeps(self) -> bool:
        return False


# Opens both halves of a memory tier on one store.


class MemoryBackend(Backend[MemorySettings]):
    """Opens both halves on one store, which the handler finds by the engine's name."""

    kind = "memory"
    settings = MemorySettings
    spec = MemorySpec
    host = True

    def __init__(self) -> None:
        # Weak, because a store lives exactly as long as the tier or a handler that uses it.
        self._stores: WeakValueDictionary[tuple[str, str, str], MemoryStore] = WeakValueDictionary()

    def check(self, settings: MemorySettings, record_bytes: int | None) -> None:
        if settings.eviction != "lru":
            raise ConfigError(
                ".eviction", f"the memory tier has no {settings.eviction!r}", 'write "lru"'
            )
        check_capacity(settings.capacity, _resolve(settings.capacity), record_bytes or 1)

    def open_tier(self, settings: MemorySettings, context: TierContext) -> MemoryTier:
        store = MemoryStore(context.namespace, _resolve(settings.capacity))
        self._stores[_name(settings, context)] = store
        return MemoryTier(store)

    def open_handler(self, settings: MemorySettings, context: TierContext) -> MemoryHandler:
        store = self._stores.get(_name(settings, context))
        if store is None:
            raise MediumError(
                f"no memory tier {settings.name!r} of engine {context.engine!r} in this process: "
                "open its tier first, and run the mover on threads"
            )
        return MemoryHandler(store)

    def open_inspector(
        self, settings: MemorySettings, context: InspectorContext
    ) -> Inspector[MemorySettings]:
        return MemoryInspector(self, settings, context)

    def identity(self, settings: MemorySettings) -> str | None:
        return f"memory:{settings.name}"


def _resolve(capacity: Capacity) -> int:
    return capacity.resolve(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _name(settings: MemorySettings, context: TierContext) -> tuple[str, str, str]:
    return context.engine, context.namespace.id, settings.name


BACKEND = MemoryBackend()
