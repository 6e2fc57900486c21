"""Least recently used, with the tail of a prefix colder than its head."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice
from typing import ClassVar

from kvtier.core.eviction.policy import UNKNOWN
from kvtier.core.eviction.slot_lists import ListPolicy

_ALL = 1


class LRU(ListPolicy):
    """What has not been used for the longest time goes first; 9 bytes a slot."""

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
