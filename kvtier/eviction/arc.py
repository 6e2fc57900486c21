"""ARC: a list for blocks used once, one for those used again, and ghosts of both that balance them.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). Here room
is made before the new blocks are known, so the balance moves just after an eviction, not before.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import ClassVar

from kvtier.eviction.ghost_lists import Ghosts
from kvtier.eviction.lru import NOWHERE, ListPolicy
from kvtier.eviction.policy import UNKNOWN, fingerprint

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
