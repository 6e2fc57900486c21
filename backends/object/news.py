"""What a keeper tells its tier, a little at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvtier.backends.object.budget import Standing
from kvtier.backends.object.manifest import Entries
from kvtier.core.slab.layout import keys_of
from kvtier.types import BlockKey

Known = Callable[[], Iterator[tuple[BlockKey, int]]]
"""All keys that a tier offers, and their generations."""


class Rows(msgspec.Struct):
    """Blocks, in columns; times in seconds since the epoch."""

    keys: list[BlockKey] = []
    generations: list[int] = []
    sizes: list[int] = []
    times: list[float] = []

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: BlockKey, generation: int, size: int, at: float) -> None:
        self.keys.append(key)
        self.generations.append(generation)
        self.sizes.append(size)
        self.times.append(at)

    def __getitem__(self, cut: slice) -> Rows:
        return Rows(self.keys[cut], self.generations[cut], self.sizes[cut], self.times[cut])


def rows_of(entries: Entries) -> Rows:
    """Entries of one kind, as a tier hears of them."""
    return Rows(
        keys_of(entries),
        entries["generation"].tolist(),
        entries["size"].tolist(),
        (entries["time_us"] / 1e6).tolist(),
    )


class News(msgspec.Struct):
    """Something that the tier does not know yet."""

    added: Rows | None = None
    """Blocks that are there."""
    removed: Rows | None = None
    """Blocks that are gone."""
    freed: list[int] = []
    """Slots whose objects are deleted."""
    unhidden: int = 0
    """So many of the hidden bytes are found again in what follows."""
    standing: Standing | None = None
    """All that others wrote down until now is known, and this is what we may do."""
