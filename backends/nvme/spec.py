"""Where blocks are on NVMe: one number a block, the slab's id above the slot's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from kvtier.types import LoadStoreSpec

SLOT_BITS = 24
SLOT_MASK = (1 << SLOT_BITS) - 1


class NvmeSpec(LoadStoreSpec, tag="nvme"):
    """Places as `slab id << 24 | slot`, and who acts (a handler writes only for a live owner)."""

    medium: ClassVar[str] = "nvme"
    places: list[int]
    owner: int

    def __len__(self) -> int:
        return len(self.places)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.places[start:stop], self.owner)

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        owner = pieces[0].owner if pieces else 0
        return cls([place for piece in pieces for place in piece.places], owner)
