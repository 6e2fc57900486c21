"""Blocks in columns, as a keeper hands them to its tier."""

from __future__ import annotations

import msgspec

from kvtier.backends.object.manifests.manifest import Entries
from kvtier.slab.layout import keys_of
from kvtier.types import BlockKey


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
    """The blocks of these entries."""
    return Rows(
        keys_of(entries),
        entries["generation"].tolist(),
        entries["size"].tolist(),
        (entries["time_us"] / 1e6).tolist(),
    )
