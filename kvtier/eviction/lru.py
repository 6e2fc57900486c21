"""Least recently used, and the lists of slots that it and others are made of."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import ClassVar

import numpy as np

from kvtier.eviction.policy import UNKNOWN, EvictionPolicy

NOWHERE = 0
"""The list of a slot that is in none."""

_END = -1


class SlotLists:
    """Doubly linked lists, numbered from 1, each with a cold and a hot end; a slot is in at most
    one. Every operation on a slot takes the same short time."""

    def __init__(self, lists: int) -> None:
        self.member_of = bytearray()
        self._colder = array("i")
        self._hotter = array("i")
        self._coldest = [_END] * (lists + 1)
        self._hottest = [_END] * (lists + 1)
        self.length = [0] * (lists + 1)

    def resize(self, slots: int) -> None:
        more = slots - len(self.member_of)
        if more > 0:
            self.member_of.extend(bytes(more))
            self._colder.frombytes(bytes(more * self._colder.itemsize))
            self._hotter.frombytes(bytes(more * self._hotter.itemsize))

    @property
    def nbytes(self) -> int:
        return len(self.member_of) * (1 + 2 * self._colder.itemsize)

    def append(self, which: int, slot: int) -> None:
        """Put a slot that is in no list at the hot end."""
        last = self._hottest[which]
        self._colder[slot] = last
        self._hotter[slot] = _END
        self._hottest[which] = slot
        if last == _END:
            self._coldest[which] = slot
        else:
            self._hotter[last] = slot
        self.member_of[slot] = which
        self.length[which] += 1

    def insert_below(self, anchor: int, slot: int) -> None:
        """Put a slot that is in no list just colder than one that is."""
        which = self.member_of[anchor]
        below = self._colder[anchor]
        self._colder[slot] = below
        self._hotter[slot] = anchor
        self._colder[anchor] = slot
        if below == _END:
            self._coldest[which] = slot
        else:
            self._hotter[below] = slot
        self.member_of[slot] = which
        self.length[which] += 1

    def unlink(self, slot: int) -> None:
        """Take a slot out of its list."""
        which = self.member_of[slot]
        below, above = self._colder[slot], self._hotter[slot]
        if below == _END:
            self._coldest[which] = above
        else:
            self._hotter[below] = above
        if above == _END:
            self._hottest[which] = below
        else:
            self._colder[above] = below
        self.member_of[slot] = NOWHERE
        self.length[which] -= 1

    def place(self, which: int, slots: Sequence[int], after: int = UNKNOWN) -> None:
        """Put a run of a prefix, head first, into a list so that its tail is colder than its head:
        just below `after` if that is in this list, else at the hot end."""
        if after != UNKNOWN and self.member_of[after] == which:
            for slot in slots:
                self.insert_below(after, slot)
                after = slot
        else:
            for slot in reversed(slots):
                self.append(which, slot)

    def coldest(self, which: int) -> int:
        """The slot at the cold end; the list must not be empty."""
        return self._coldest[which]

    def from_coldest(self, which: int) -> Iterator[int]:
        """Slots from cold to hot; the list must not change meanwhile."""
        hotter = self._hotter
        slot = self._coldest[which]
        while slot != _END:
            yield slot
            slot = hotter[slot]

    def append_all(self, which: int, slots: Sequence[int]) -> None:
        """Put many slots that are in no list at the hot end, coldest first, all at once."""
        if not len(slots):
            return
        run = np.asarray(slots, dtype=np.int32)
        colder = np.frombuffer(self._colder, dtype=np.int32)
        hotter = np.frombuffer(self._hotter, dtype=np.int32)
        last = self._hottest[which]
        colder[run[1:]] = run[:-1]
        hotter[run[:-1]] = run[1:]
        colder[run[0]] = last
        hotter[run[-1]] = _END
        np.frombuffer(self.member_of, dtype=np.uint8)[run] = which
        if last == _END:
            self._coldest[which] = int(run[0])
        else:
            hotter[last] = run[0]
        self._hottest[which] = int(run[-1])
        self.length[which] += len(run)


class ListPolicy(EvictionPolicy):
    """A policy whose resident slots are those in its lists."""

    lists: ClassVar[int]
    """How many there are."""
    loaded_into: ClassVar[int] = 1
    """The one for what a restart found."""

    def __init__(self, slots: int = 0) -> None:
        self._lists = SlotLists(self.lists)
        super().__init__(slots)

    def resize(self, slots: int) -> None:
        self.slots = max(self.slots, slots)
        self._lists.resize(slots)

    def remove(self, slots: Sequence[int]) -> None:
        member_of, unlink = self._lists.member_of, self._lists.unlink
        for slot in slots:
            if member_of[slot] != NOWHERE:
                unlink(slot)

    def _unpinned(self, which: int, pinned: Container[int]) -> Iterator[int]:
        """The slots of a list that may go, from cold to hot."""
        return (slot for slot in self._lists.from_coldest(which) if slot not in pinned)

    def load(self, slots: Sequence[int], last_used: Sequence[float] | None = None) -> None:
        self._lists.append_all(self.loaded_into, slots)

    def __len__(self) -> int:
        return sum(self._lists.length)

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and 0 <= slot < self.slots and self._lists.member_of[slot] > 0

    @property
    def nbytes(self) -> int:
        return self._lists.nbytes


_ALL = 1


class LRU(ListPolicy):
    """Evicts the least recently used, the tail of a prefix before its head; 9 bytes a slot."""

    name: ClassVar[str] = "lru"
    lists = 1

    def use(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        after: int = UNKNOWN,
        ahead: int = 0,
    ) -> None:
        self.remove(slots)
        self._lists.place(_ALL, slots, after)

    def victims(self, count: int, pinned: Container[int] = ()) -> list[int]:
        return list(islice(self._unpinned(_ALL, pinned), max(count, 0)))
