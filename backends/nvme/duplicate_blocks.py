"""Blocks in others' slabs that are not offered from there: they are known from elsewhere, too, or
somebody still reads what stood in their slot before. They are noted until that ends: a keeper tells
of each change once."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.types import BlockKey


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
