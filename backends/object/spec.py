"""Where blocks are in an object store: their names follow from key and generation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Self

from kvtier.types import LoadStoreSpec


class ObjectSpec(LoadStoreSpec, tag="object"):
    """The generation of each block, and which objects must go before it may be written."""

    medium: ClassVar[str] = "object"
    generations: list[int]
    instead_of: list[list[str]] = []
    """For stores, names of evicted objects a block; deleted first, so that the budget holds."""
    until: float = math.inf
    """For stores, when (by `budget.clock`) the claim ends that gives them room."""

    def __len__(self) -> int:
        return len(self.generations)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.generations[start:stop], self.instead_of[start:stop], self.until)

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls(
            [generation for piece in pieces for generation in piece.generations],
            [names for piece in pieces for names in piece.instead_of],
            min((piece.until for piece in pieces), default=math.inf),
        )
