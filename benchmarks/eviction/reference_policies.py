"""The policies that the adaptive one is measured beside: ARC and S3-FIFO, with their ghosts.

ARC after Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003);
S3-FIFO after Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from itertools import chain, islice
from typing import ClassVar

from kvtier.eviction import UNKNOWN, EvictionPolicy, create_policy, policy_names
from kvtier.eviction.policy import NOWHERE, ListPolicy, SlotLists, fingerprint

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


_ONCE = 1
_AGAIN = 2


class ARC(ListPolicy):
    """Shares the room between recency and frequency as the ghosts advise; 37 to 45 bytes a slot."""

    name: ClassVar[str] = "arc"
    lists = 2

    def __init__(self, slots: int = 0) -> None:
        self._prints = array("I")
        self._ghosts = Ghosts(2)
        self._target = 0.0
        """How many blocks the list of those used once should hold."""
        super().__init__(slots)

    def resize(self, slots: int) -> None:
        more = slots - self.slots
        super().resize(slots)
        if more > 0:
            self._prints.frombytes(bytes(4 * more))
            self._ghosts.resize(slots)

    def use(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        after: int = UNKNOWN,
        ahead: int = 0,
    ) -> None:
        lists = self._lists
        member_of = lists.member_of
        once: list[int] = []
        again: list[int] = []
        for slot, key in zip(slots, keys, strict=True):
            if member_of[slot] != NOWHERE:
                lists.unlink(slot)
                again.append(slot)
                continue
            print_ = self._prints[slot] = fingerprint(key)
            (again if self._recognise(print_) else once).append(slot)
        lists.place(_AGAIN, again, after)
        lists.place(_ONCE, once, after)

    def _recognise(self, print_: int) -> bool:
        """Whether this is a ghost; if so, the list that it left gets more room."""
        ghosts = self._ghosts
        left = ghosts.find(print_)
        if left == NOWHERE:
            return False
        once, again = ghosts.length(_ONCE), ghosts.length(_AGAIN)
        if left == _ONCE:
            self._target = min(self._target + max(1.0, again / once), float(self.slots))
        else:
            self._target = max(self._target - max(1.0, once / again), 0.0)
        ghosts.take(print_)
        return True

    def victims(self, count: int, pinned: Container[int] = ()) -> list[int]:
        once, again = self._unpinned(_ONCE, pinned), self._unpinned(_AGAIN, pinned)
        left = self._lists.length[_ONCE]
        found: list[int] = []
        while len(found) < count:
            slot = UNKNOWN
            if left > self._target:
                slot = next(once, UNKNOWN)
                left -= 1
            if slot == UNKNOWN:
                slot = next(again, UNKNOWN)
            if slot == UNKNOWN:
                slot = next(once, UNKNOWN)
            if slot == UNKNOWN:
                break
            found.append(slot)
        return found

    def evict(self, count: int, pinned: Container[int] = ()) -> list[int]:
        slots = self.victims(count, pinned)
        lists, ghosts = self._lists, self._ghosts
        for slot in slots:
            which = lists.member_of[slot]
            lists.unlink(slot)
            self._trim(which)
            ghosts.add(which, self._prints[slot])
        return slots

    def _trim(self, which: int) -> None:
        """Make room for a ghost: those used once and their ghosts are at most as many as slots."""
        ghosts = self._ghosts
        once, again = ghosts.length(_ONCE), ghosts.length(_AGAIN)
        if which == _ONCE and once and once + self._lists.length[_ONCE] >= self.slots:
            ghosts.drop_oldest(_ONCE)
        elif once + again >= ghosts.room:
            ghosts.drop_oldest(_AGAIN if again else _ONCE)

    @property
    def nbytes(self) -> int:
        return super().nbytes + 4 * self.slots + self._ghosts.nbytes


_SMALL = 1
_MAIN = 2
_LEAVING = 3
_GHOSTS = 1
_SMALL_SHARE = 10
_USES_MAX = 3
_CHANCES = 1 << 11
_CHANCES_EACH = 8
"""So many slots that were used get another chance at once, and for each that has to go."""


class S3FIFO(ListPolicy):
    """New blocks wait in a tenth of the room; only those used again move to the rest. 38 to 46
    bytes a slot.

    Choosing a victim moves blocks between the queues, so what `victims` has chosen waits in a queue
    of its own until `evict` takes it, or a use brings it back to the main queue.
    """

    name: ClassVar[str] = "s3fifo"
    lists = 3
    loaded_into = _MAIN

    def __init__(self, slots: int = 0) -> None:
        self._uses = bytearray()
        self._prints = array("I")
        self._ghosts = Ghosts(1)
        super().__init__(slots)

    def resize(self, slots: int) -> None:
        more = slots - self.slots
        super().resize(slots)
        if more > 0:
            self._uses.extend(bytes(more))
            self._prints.frombytes(bytes(4 * more))
            self._ghosts.resize(slots)

    def use(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        after: int = UNKNOWN,
        ahead: int = 0,
    ) -> None:
        member_of, uses, lists = self._lists.member_of, self._uses, self._lists
        for index in range(len(slots) - 1, -1, -1):
            slot = slots[index]
            where = member_of[slot]
            if where != NOWHERE:
                uses[slot] = min(uses[slot] + 1, _USES_MAX)
                if where == _LEAVING:
                    lists.unlink(slot)
                    lists.append(_MAIN, slot)
                continue
            uses[slot] = 0
            print_ = self._prints[slot] = fingerprint(keys[index])
            lists.append(_MAIN if self._ghosts.take(print_) else _SMALL, slot)

    def victims(self, count: int, pinned: Container[int] = ()) -> list[int]:
        lists = self._lists
        known = list(islice(self._unpinned(_LEAVING, pinned), max(count, 0)))
        more = self._take(count - len(known), pinned)
        for slot in more:
            lists.append(_LEAVING, slot)
        return known + more

    def evict(self, count: int, pinned: Container[int] = ()) -> list[int]:
        slots = self.victims(count, pinned)
        lists, ghosts, prints = self._lists, self._ghosts, self._prints
        for slot in slots:
            lists.unlink(slot)
            if ghosts.length(_GHOSTS) == ghosts.room:
                ghosts.drop_oldest(_GHOSTS)
            ghosts.add(_GHOSTS, prints[slot])
        return slots

    def _take(self, count: int, pinned: Container[int]) -> list[int]:
        """Take up to `count` slots out of the two queues."""
        lists = self._lists
        taken: list[int] = []
        # A count of uses is at most 3: who has not left after four turns is pinned. But all may
        # have been used, and no request is to wait for four turns of a million.
        chances = min((_USES_MAX + 1) * len(self), _CHANCES + _CHANCES_EACH * count)
        while len(taken) < count and chances > 0:
            slot = self._choose(pinned)
            if slot == UNKNOWN:
                chances -= 1
            else:
                taken.append(slot)
        if len(taken) < count:
            left = chain(self._unpinned(_MAIN, pinned), self._unpinned(_SMALL, pinned))
            for slot in list(islice(left, count - len(taken))):
                lists.unlink(slot)
                taken.append(slot)
        return taken

    def _choose(self, pinned: Container[int]) -> int:
        """Look at one slot at the cold end: it is taken out, or gets another chance."""
        lists, uses = self._lists, self._uses
        small = lists.length[_SMALL]
        if small and (small * _SMALL_SHARE >= self.slots or not lists.length[_MAIN]):
            slot, kept = lists.coldest(_SMALL), 0
        elif lists.length[_MAIN]:
            slot = lists.coldest(_MAIN)
            kept = uses[slot] - 1
        else:
            return UNKNOWN
        lists.unlink(slot)
        if slot in pinned:
            lists.append(_MAIN, slot)
            return UNKNOWN
        if uses[slot]:
            uses[slot] = kept
            lists.append(_MAIN, slot)
            return UNKNOWN
        return slot

    @property
    def nbytes(self) -> int:
        return super().nbytes + 5 * self.slots + self._ghosts.nbytes


REFERENCE_POLICIES: dict[str, type[EvictionPolicy]] = {"arc": ARC, "s3fifo": S3FIFO}
EVERY_POLICY = sorted([*policy_names(), *REFERENCE_POLICIES])


def new_policy(name: str, slots: int = 0) -> EvictionPolicy:
    """A policy of this name, of those here or of the product's; raises ConfigError."""
    found = REFERENCE_POLICIES.get(name)
    return create_policy(name, slots) if found is None else found(slots)
