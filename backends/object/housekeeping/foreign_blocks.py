"""Blocks of other namespaces, as a listing shows them: their bytes, and the oldest of them."""

from __future__ import annotations

import heapq

import msgspec

from kvtier.backends.object.lock_yield import LockYield
from kvtier.backends.object.stores.store import ObjectInfo, check_namespaces

_NEEDED_SHARE = 16
"""A namespace without room asks for this part of the budget."""
_CANDIDATES_MAX = 1 << 16


class _Block(msgspec.Struct, frozen=True, order=True, gc=False):
    """The youngest block is the least, as a heap of the oldest ones needs it."""

    minus_modified_s: float
    size: int
    name: str


class ForeignBlocks:
    """The bytes of each namespace, and a bounded number of the oldest blocks of all."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._oldest: list[_Block] = []

    def add(self, namespace: str, info: ObjectInfo, *, deletable: bool) -> None:
        self.bytes[namespace] = self.bytes.get(namespace, 0) + info.size
        check_namespaces(self.bytes)
        if not deletable:
            return
        block = _Block(-info.modified_s, info.size, info.name)
        if len(self._oldest) < _CANDIDATES_MAX:
            heapq.heappush(self._oldest, block)
        else:
            heapq.heappushpop(self._oldest, block)

    def take_surplus(
        self, own_bytes: int, capacity: int, lock_yield: LockYield, *, needs_room: bool
    ) -> dict[str, int]:
        """Sizes by name of the oldest blocks that must go, in proportion to what other namespaces
        hold of the whole. `needs_room`: some must go even if the budget holds."""
        foreign = sum(self.bytes.values())
        total = own_bytes + foreign
        surplus = max(0, total - capacity)
        if needs_room:
            surplus = max(surplus, total + capacity // _NEEDED_SHARE - capacity)
        if surplus <= 0 or not foreign:
            return {}
        share = min(foreign, surplus * foreign // total + 1)
        chosen = self._oldest
        chosen_bytes = sum(block.size for block in chosen)
        while chosen and chosen_bytes - chosen[0].size >= share:
            lock_yield()
            chosen_bytes -= heapq.heappop(chosen).size
        return {block.name: block.size for block in chosen}

    def remove(self, name: str, size: int) -> None:
        """This block is deleted."""
        self.bytes[name.partition("/")[0]] -= size
