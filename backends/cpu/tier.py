"""The catalogue of an engine's CPU memory: a commit is one byte, written to a mapped table."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from kvtier.backends.cpu.folder import CpuFolder, note_use, tidy_up
from kvtier.backends.cpu.medium import CpuSpec, Row
from kvtier.errors import FormatError
from kvtier.eviction import EvictionPolicy
from kvtier.slab import layout
from kvtier.slab.files import SlabFile
from kvtier.slab.folder_tier import FolderTier
from kvtier.slab.keeper import SlabKeeper
from kvtier.slab.layout import piece_slots
from kvtier.slab.numbering import SlotPlace
from kvtier.types import BlockKey, Fate, Reservation, TierStats

logger = logging.getLogger(__name__)

_NOTE_USE_S = 3600.0
_PINS_S = 1.0
_HEAR_S = 0.1
_HEARD_MAX = 512
"""So many requests of neighbours are taken in at once: a step of the engine waits meanwhile."""


class CpuTier(FolderTier):
    """Slabs in shared memory: own ones are written through their mappings, and those of other
    engines of the stack are read."""

    idle_s = 0.2

    def __init__(
        self, keeper: SlabKeeper, folder: CpuFolder, policy: EvictionPolicy, keep_s: float
    ) -> None:
        self.region = folder.region
        self._entries = self.region.entries()
        self._keep_s = keep_s
        self._folder = folder
        self._heard: deque[tuple[float, list[tuple[int, int]]]] = deque(maxlen=_HEARD_MAX)
        """When requests of neighbours used slabs and slots, some of which are ours."""
        self._next_note = self._next_pins = self._next_heard = 0.0
        self._generation = 0
        self._pinning = False
        """Whether some slots may be pinned, and others not."""
        self._leaving: list[SlotPlace] = []
        """Own slabs that are lost, and to which somebody may still be copying."""
        super().__init__("cpu", keeper, policy)
        self._pinning = True
        self.forget_hottest()
        self._free_in_order_of_pinning()
        self._learn_with_neighbours()

    def _learn_with_neighbours(self) -> None:
        """And from those that are dead: what a prompt's blocks were used for, and when, is known to
        whichever engine is asked for it next."""
        size = self._policy.shared_bytes(self._slots_ahead())
        memory = self._folder.learned(size) if size else None
        if memory is not None:
            self._policy.share(memory, self._clock())

    def _free_in_order_of_pinning(self) -> None:
        order = self.region.pinning_order()
        place = {piece.start: at for at, piece in enumerate(order)}
        starts = np.array(sorted(place), np.int64)
        if len(starts):
            free = np.array(self._free, np.int64)
            piece = starts[np.searchsorted(starts, free, "right") - 1]
            rank = np.array([place[start] for start in piece.tolist()], np.int64)
            self._free.clear()
            self._free.extend(free[np.lexsort((free, rank))].tolist())

    # -- slabs -----------------------------------------------------------------------------

    def _slots_ahead(self) -> int:
        """All there is room for: memory is taken, and pinned, before anybody asks for it."""
        return self._keeper.limits.capacity // self.slot_bytes

    def _want_room(self) -> None:
        missing = self._low_water - self._places.own_slots
        if missing > 0 and not (self._full and self._places.alone):
            self._keeper.want_room(missing)

    @property
    def _full(self) -> bool:
        """Whether the slabs that are known take all there is."""
        least = self._keeper.limits.slot_bytes + layout.ENTRY_BYTES
        slots, slabs = self._places.all_slots, len(self._places.by_slab)
        used = slots * least + slabs * layout.TABLE_AT
        return used + least + layout.TABLE_AT + self._keeper.limits.slack > (
            self._keeper.limits.capacity
        )

    def _number(self, slab: SlabFile) -> SlotPlace | None:
        place = super()._number(slab)
        assert place is not None
        try:
            self._map(place)
        except (FormatError, OSError, ValueError) as error:
            logger.warning("slab %08x cannot be mapped: %s", slab.id, error)
            self._places.lose(place)
            return None
        return place

    def _map(self, place: SlotPlace) -> None:
        header = place.slab.header
        row = Row(header.slab_id, place.base, header.slots, int(place.mine))
        self.region.put(self._places.index(place), row)

    def _own(self, place: SlotPlace, *, mine: bool) -> None:
        super()._own(place, mine=mine)
        self._pinning = True
        try:
            self._map(place)
        except (FormatError, OSError) as error:
            logger.warning("slab %08x cannot be written to: %s", place.slab.id, error)
            super()._own(place, mine=False)

    def _own_blocks(
        self, place: SlotPlace, entries: npt.NDArray[np.void], before: Set[BlockKey]
    ) -> list[BlockKey]:
        self._generation = max(self._generation, int(entries["generation"].max(initial=0)))
        return super()._own_blocks(place, entries, before)

    def _lose(self, places: Collection[SlotPlace], fate: Fate) -> None:
        mine = [place for place in places if place.mine]
        super()._lose(places, fate)
        self._leaving += mine
        for place in places:
            if place not in mine:
                self._unmap(place)
        self._let_leave()

    def _let_leave(self) -> None:
        """Unmap what nobody copies to any more, unless others have its numbers by now."""
        leaving, self._leaving = self._leaving, []
        for place in leaving:
            if self._busy(place):
                self._leaving.append(place)
            else:
                self._unmap(place)

    def _unmap(self, place: SlotPlace) -> None:
        at = self._places.index(place)
        if self._places.is_hole(place):
            with contextlib.suppress(OSError):
                self.region.drop(at)

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        reservation = super().prepare_store(keys, evict=evict)
        if not reservation.keys:  # perhaps because there is no room for any
            self._want_room()
        return reservation

    # -- entries ---------------------------------------------------------------------------

    def _locate(self, slots: list[int]) -> CpuSpec:
        return CpuSpec(slots)

    def _on_reserved(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._generation = (self._generation + 1) & 0xFFFFFFFF
        packed = layout.pack_entries(layout.FREE, keys, self._generation, int(self._clock()))
        rows = np.array(slots, np.intp)
        self._entries[rows] = np.frombuffer(packed, layout.ENTRY_DTYPE)
        self._entries["state"][rows] = layout.RESERVED
        super()._on_reserved(slots, keys)

    def _set_state(self, slots: Iterable[int], state: int) -> None:
        table, entry_bytes, table_at = self.region.table, layout.ENTRY_BYTES, layout.TABLE_AT
        for slot in slots:
            table[table_at + slot * entry_bytes] = state
        for at in self._places.indices(slots):
            self.region.note_change(at)

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._set_state(slots, layout.VALID)

    def _on_dropped(self, slots: Sequence[int]) -> None:
        self._set_state(self._own_among(slots), layout.FREE)

    def _held_twice(self, count: int, taken: Container[int]) -> list[int]:
        """So that the last copy on the machine goes last."""
        where, found = self._where, list[int]()
        for key in self._copies.slot_of if count > 0 else ():
            slot = where.get(key)
            if slot is not None and slot not in taken and slot in self._policy:
                found.append(slot)
                if len(found) == count:
                    break
        return found

    def _on_evicted(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """They are free a moment later."""

    def _on_quarantined(self, slot: int, key: BlockKey) -> None:
        self._set_state([slot], layout.BAD)

    def _make_free(self, slots: Sequence[int]) -> None:
        self._set_state(slots, layout.FREE)
        near = self._pinned_among(slots) if self._pinning else ()
        if near:
            self._free.extendleft(reversed(near))
            slots = sorted(set(slots).difference(near))
        super()._make_free(slots)

    def _pinned_among(self, slots: Sequence[int]) -> list[int]:
        """Those that a device reaches already: they are to be used before others, as long as there
        are others."""
        pinned = {at: self.region.mark.pinned(at) for at in self._places.indices(slots)}
        if not any(pinned.values()):
            return []
        near, step = list[int](), piece_slots(self.slot_bytes)
        for slot in slots:
            place = self._places.of(slot)
            if pinned[self._places.index(place)] >> (slot - place.base) // step & 1:
                near.append(slot)
        return near

    def _pins_are_made(self) -> bool:
        """Whether a device reaches all own slots, or as many as ever."""
        step = piece_slots(self.slot_bytes)
        return all(
            self.region.mark.pinned(self._places.index(place))
            == (1 << -(-place.slab.header.slots // step)) - 1
            for place in self._own_places()
        )

    def _own_places(self) -> list[SlotPlace]:
        """For any thread: the tier's own may number another slab meanwhile."""
        return [place for place in list(self._places.by_slab.values()) if place.mine]

    def give_up(self, keys: Sequence[BlockKey]) -> None:
        waiting = [key for key in keys if self._state_of(key) == layout.RESERVED]
        self._set_state([self._reserved[key] for key in waiting], layout.FAILED)

    def arrived(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if self._state_of(key) == layout.ARRIVED]

    def _state_of(self, key: BlockKey) -> int | None:
        """What the table says of a reserved key: movers and workers write there, too."""
        slot = self._reserved.get(key)
        return None if slot is None else self.region.state(slot)

    def _on_used_by_us(self, slots: Sequence[int]) -> None:
        of = self._places.of
        places = [(place := of(slot), slot - place.base) for slot in slots]
        self.region.mark.tell_used([(place.slab.id, slot) for place, slot in places])

    def _tell_policy(self) -> None:
        by_slab = self._places.by_slab
        for at, used in [self._heard.popleft() for _ in range(len(self._heard))]:
            known = [by_slab[slab_id].base + slot for slab_id, slot in used if slab_id in by_slab]
            slots = [slot for slot in dict.fromkeys(known) if slot in self._policy]
            if slots:
                self._note_uses(slots)
                self._policy.use(slots, [self._key_at(slot) for slot in slots], at)
        super()._tell_policy()

    def hear(self) -> None:
        """Learn what neighbours have used of late: eviction knows of all uses."""
        now = self._clock()
        self._heard.extend((now, used) for used in self._folder.uses_by_others())

    def _note_uses(self, slots: Sequence[int]) -> None:
        rows = np.array(slots, np.intp)
        self._entries["used_at"][rows] = int(self._clock())
        self._entries["uses"][rows] += 1

    def _on_carried(self, used: Mapping[int, tuple[int, int]]) -> None:
        for slot, (uses, at) in used.items():
            self._entries["used_at"][slot], self._entries["uses"][slot] = at, uses

    # -- the rest --------------------------------------------------------------------------

    def _give_up_slabs(self) -> None:
        """None: what is evicted is free at once, so that none of it can be found again."""

    def tick(self) -> None:
        super().tick()
        if self._leaving:
            self._let_leave()

    def _between_rounds(self) -> None:
        super()._between_rounds()
        now = time.monotonic()  # a clock that is put back must not keep it from being said
        if now >= self._next_heard and not self._places.alone:
            self._next_heard = now + _HEAR_S
            self.hear()
        if now >= self._next_note:
            self._next_note = now + _NOTE_USE_S
            self._note_use()
        if self._pinning and now >= self._next_pins:
            self._next_pins = now + _PINS_S
            self._pinning = not self._pins_are_made()

    def _note_use(self) -> None:
        tables = [self._folder.table_path(place.slab.id) for place in self._own_places()]
        note_use(self._folder.root, self._keep_s, tables)

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """Whether other engines of the stack have memory now."""
        return not self._places.alone

    @property
    def has_room(self) -> bool:
        """Whether there is a slab that it may store in."""
        return self._places.own_slots > 0

    @property
    def others_have_all(self) -> bool:
        """Whether there are slabs, and none of them is ours."""
        return bool(self._places.by_slab) and not self.has_room

    @property
    def others_may_give(self) -> bool:
        """Whether a neighbour has more than the one slab that it keeps in any case."""
        owners = Counter(place.slab.owner for place in self._places.by_slab.values())
        return max(owners.values(), default=0) > 1

    def stats(self) -> TierStats:
        stats = super().stats()
        stats.bytes_capacity = self._places.all_slots * self.slot_bytes
        return stats

    def close(self) -> None:
        self._note_use()
        super().close()
        self._policy.close()
        self._entries = np.empty(0, layout.ENTRY_DTYPE)
        self.region.close()
        tidy_up(self._folder.root)
