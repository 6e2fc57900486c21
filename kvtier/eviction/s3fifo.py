"""S3-FIFO: a small queue for what is new, a main queue for what was used again, and ghosts.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from itertools import chain, islice
from typing import ClassVar

from kvtier.eviction.ghost_lists import Ghosts
from kvtier.eviction.lru import NOWHERE, ListPolicy
from kvtier.eviction.policy import UNKNOWN, fingerprint

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
