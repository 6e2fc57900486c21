"""A dict of blocks in many parts: a large one stops all threads for a while whenever it grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from kvtier.types import BlockKey

_V = TypeVar("_V")
_PARTS = 256


class Spread(Generic[_V]):
    """Values by key and generation."""

    def __init__(self) -> None:
        self._parts: list[dict[tuple[BlockKey, int], _V]] = [{} for _ in range(_PARTS)]

    def part(self, key: BlockKey) -> dict[tuple[BlockKey, int], _V]:
        """The part in which this key is, or would be."""
        return self._parts[key[0]]

    def items(self) -> Iterator[tuple[tuple[BlockKey, int], _V]]:
        for part in self._parts:
            yield from part.items()
