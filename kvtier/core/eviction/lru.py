"""Least recently used, with the tail of a prefix colder than its head."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

from kvtier.core.eviction.policy import UNKNOWN, EvictionPolicy
from kvtier.core.eviction.slotlists import SlotLists

_ALL = 1


class LRU(EvictionPolicy):
    """What has not been used for the longest time goes first; 9 bytes a slot."""

    name: ClassVar[str] = "lru"

    def __init__(self, slots: int = 0) -> None:
        self._lists = SlotLists(1)
        super().__init__(slots)

    def resize(self, slots: int) -> None:
        self.slots = max(self.slots, slots)
        self._lists.resize(slots)

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
        found: list[int] = []
        if count > 0:
            for slot in self._lists.from_coldest(_ALL):
                if slot not in pinned:
                    found.append(slot)
                    if len(found) == count:
                        break
        return found

    def remove(self, slots: Sequence[int]) -> None:
        member_of, unlink = self._lists.member_of, self._lists.unlink
        for slot in slots:
            if member_of[slot]:
                unlink(slot)

    def load(self, slots: Sequence[int], last_used: Sequence[float] | None = None) -> None:
        self._lists.append_all(_ALL, slots)

    def __len__(self) -> int:
        return self._lists.length[_ALL]

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and 0 <= slot < self.slots and self._lists.member_of[slot] > 0

    @property
    def nbytes(self) -> int:
        return self._lists.nbytes
