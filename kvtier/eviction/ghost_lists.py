"""Fingerprints of evicted blocks in bounded lists: no key object is kept."""

from __future__ import annotations

from array import array

from kvtier.eviction.lru import NOWHERE, SlotLists
from kvtier.eviction.policy import UNKNOWN

_SPREAD = 0x9E3779B1


class Ghosts:
    """At most `room` fingerprints, each in one of several lists from old to new.

    An open-addressing table of two to four times the room finds them, so that one costs 25 to 33
    bytes.
    """

    def __init__(self, lists: int) -> None:
        self.room = 0
        self._order = SlotLists(lists)
        self._unused = array("i")
        self._prints = array("I")
        self._table = array("i")
        self._mask = 0

    @property
    def nbytes(self) -> int:
        return self._order.nbytes + 4 * (2 * len(self._prints) + len(self._table))

    def length(self, which: int) -> int:
        return self._order.length[which]

    def resize(self, room: int) -> None:
        """Have room for more."""
        if room <= self.room:
            return
        self._prints.frombytes(bytes(4 * (room - self.room)))
        self._order.resize(room)
        self._unused.extend(range(room - 1, self.room - 1, -1))
        self.room = room
        mask = (1 << (2 * room - 1).bit_length()) - 1
        if mask == self._mask:  # a tier that grows slab by slab calls for each
            return
        self._mask = mask
        self._table = array("i", bytes([255]) * (4 * (self._mask + 1)))
        for entry in range(room):
            if self._order.member_of[entry] != NOWHERE:
                self._table[self._cell(self._prints[entry])] = entry

    def _cell(self, print_: int) -> int:
        """Where in the table this fingerprint is, or would be put."""
        table, prints, mask = self._table, self._prints, self._mask
        cell = print_ * _SPREAD >> 7 & mask
        entry = table[cell]
        while entry != UNKNOWN and prints[entry] != print_:
            cell = (cell + 1) & mask
            entry = table[cell]
        return cell

    def take(self, print_: int) -> int:
        """Forget this fingerprint; returns the list it was in, NOWHERE if in none."""
        if not self.room:
            return NOWHERE
        cell = self._cell(print_)
        entry = self._table[cell]
        if entry == UNKNOWN:
            return NOWHERE
        which = self._order.member_of[entry]
        self._order.unlink(entry)
        self._unused.append(entry)
        self._close_gap(cell)
        return which

    def find(self, print_: int) -> int:
        """The list this fingerprint is in, NOWHERE if in none."""
        if not self.room:
            return NOWHERE
        entry = self._table[self._cell(print_)]
        return NOWHERE if entry == UNKNOWN else self._order.member_of[entry]

    def _close_gap(self, gap: int) -> None:
        """Empty a cell and move up what was put behind it only because it was taken."""
        table, prints, mask = self._table, self._prints, self._mask
        cell = gap
        while True:
            cell = (cell + 1) & mask
            entry = table[cell]
            if entry == UNKNOWN:
                break
            home = prints[entry] * _SPREAD >> 7 & mask
            if (cell - home) & mask >= (cell - gap) & mask:
                table[gap] = entry
                gap = cell
        table[gap] = UNKNOWN

    def drop_oldest(self, which: int) -> None:
        """Forget the oldest fingerprint of a list that is not empty."""
        self.take(self._prints[self._order.coldest(which)])

    def add(self, which: int, print_: int) -> None:
        """Remember a fingerprint as the newest of a list, which has room for it."""
        cell = self._cell(print_)
        entry = self._table[cell]
        if entry == UNKNOWN:
            entry = self._unused.pop()
            self._prints[entry] = print_
            self._table[cell] = entry
        else:
            self._order.unlink(entry)
        self._order.append(which, entry)
