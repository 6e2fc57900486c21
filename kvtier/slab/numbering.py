"""How the slots of all slabs of a namespace are numbered through in one process."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from kvtier.slab.files import SlabFile
from kvtier.slab.layout import SLOT_BITS
from kvtier.types import BlockKey


class SlotPlace:
    """A slab's range of this process's slot numbers."""

    __slots__ = ("base", "mine", "room", "slab")

    def __init__(self, slab: SlabFile, base: int, room: int) -> None:
        self.slab = slab
        self.base = base
        self.room = room
        """How many numbers there are: the range may have been a larger slab's."""
        self.mine = False

    @property
    def slots(self) -> range:
        return range(self.base, self.base + self.slab.header.slots)


class Places:
    """The slabs that are there, each with its place. A slot keeps its number as long as its slab
    is there."""

    def __init__(self, aligned: int = 1) -> None:
        """Ranges have a multiple of so many numbers."""
        self._aligned = aligned
        self.by_slab: dict[int, SlotPlace] = {}
        self._ranges: list[SlotPlace] = []
        """The place that each range has, or had: see `_holes`."""
        self._range_of = array("I")
        self._origins: list[int] = []
        """What is added to a number of each range to say where the slot is."""
        self._holes: list[int] = []
        """Ranges whose slabs are no longer there: they may be given to others."""
        self._mine = 0
        self.own_slots = 0

    @property
    def slots(self) -> int:
        """How many numbers there are."""
        return len(self._range_of)

    @property
    def all_mine(self) -> bool:
        """Whether no slab is another's."""
        return self._mine == len(self._ranges)

    @property
    def all_slots(self) -> int:
        """How many slots there are, of all slabs."""
        return sum(place.slab.header.slots for place in self.by_slab.values())

    @property
    def alone(self) -> bool:
        """Whether nobody else has slabs now."""
        return self._mine == len(self.by_slab)

    def index(self, place: SlotPlace) -> int:
        """A number for a place, small and the same as long as its slab is there."""
        return self._range_of[place.base]

    def indices(self, slots: Iterable[int]) -> set[int]:
        """The numbers of the places of slots."""
        return set(map(self._range_of.__getitem__, slots))

    def is_hole(self, place: SlotPlace) -> bool:
        """Whether a place that was lost has not become another's."""
        at = self.index(place)
        return self._ranges[at] is place and at in self._holes

    def of(self, slot: int) -> SlotPlace:
        """The place that a slot belongs to."""
        return self._ranges[self._range_of[slot]]

    def where(self, slots: Iterable[int]) -> list[int]:
        """Where slots are in the folder, in the words of `NvmeSpec`."""
        origins, range_of = self._origins, self._range_of
        return [origins[range_of[slot]] + slot for slot in slots]

    def add(self, slab: SlabFile, busy: Callable[[SlotPlace], bool]) -> SlotPlace:
        """Number the slots of a slab: by a range that a lost one has left, and in which nothing is
        busy any more, or a new one."""
        for index in self._holes:
            hole = self._ranges[index]
            if hole.room >= slab.header.slots and not busy(hole):
                place = self._ranges[index] = SlotPlace(slab, hole.base, hole.room)
                self._holes.remove(index)
                break
        else:
            index = len(self._ranges)
            room = -(-slab.header.slots // self._aligned) * self._aligned
            place = SlotPlace(slab, self.slots, room)
            self._ranges.append(place)
            self._origins.append(0)
            self._range_of.extend(array("I", [index]) * room)
        self._origins[index] = (slab.id << SLOT_BITS) - place.base
        self.by_slab[slab.id] = place
        return place

    def own(self, place: SlotPlace, mine: bool) -> None:
        """Say whether a slab is this process's own."""
        self._mine += mine - place.mine
        self.own_slots += (mine - place.mine) * place.slab.header.slots
        place.mine = mine

    def lose(self, place: SlotPlace) -> None:
        """A slab is there no more."""
        self.own(place, False)
        self._holes.append(self._range_of[place.base])
        del self.by_slab[place.slab.id]


class Copies:
    """One slot for each such block, the one heard of last."""

    def __init__(self) -> None:
        self.slot_of: dict[BlockKey, int] = {}
        self._key_in: dict[int, BlockKey] = {}

    def __bool__(self) -> bool:
        return bool(self.slot_of)

    def note(self, slot: int, key: BlockKey) -> None:
        """A block stands in this slot, too."""
        self.take([key])
        self.slot_of[key] = slot
        self._key_in[slot] = key

    def held_in(self, slots: Iterable[int]) -> list[BlockKey]:
        """The blocks that were noted of these slots."""
        return [self._key_in[slot] for slot in slots if slot in self._key_in]

    def take(self, keys: Iterable[BlockKey]) -> list[tuple[int, BlockKey]]:
        """Where these blocks stand, too, which is noted no more."""
        taken = [(self.slot_of.pop(key), key) for key in dict.fromkeys(keys) if key in self.slot_of]
        for slot, _ in taken:
            del self._key_in[slot]
        return taken

    def clear(self) -> None:
        """Note nothing any more."""
        self.slot_of.clear()
        self._key_in.clear()
