"""Where blocks are in an object store: their names follow from key and generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Self

from kvtier.types import LoadStoreSpec


class ObjectSpec(LoadStoreSpec, tag="object"):
    """The generation of each block, and which objects are deleted before it is written."""

    medium: ClassVar[str] = "object"
    generations: list[int]
    delete_first: list[list[str]] = []
    """For stores: for each block, names of evicted objects that are deleted before it is written,
    so that the budget holds."""
    until: float = math.inf
    """For stores: when (by `budget.clock`) the room that they were given is another's."""

    def __len__(self) -> int:
        return len(self.generations)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.generations[start:stop], self.delete_first[start:stop], self.until)

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls(
            [generation for piece in pieces for generation in piece.generations],
            [names for piece in pieces for names in piece.delete_first],
            min((piece.until for piece in pieces), default=math.inf),
        )
