"""What a keeper tells its tier, a little at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object import manifest
from kvtier.backends.object.budget import Standing
from kvtier.backends.object.manifest import ADDED, Entries
from kvtier.backends.object.spread import Spread, mark
from kvtier.types import BlockKey

_LATELY_US = 600_000_000

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
        manifest.keys_of(entries),
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


def leaving_by(news: Sequence[News]) -> set[bytes]:
    """The marks of what is told to be gone."""
    return {
        mark(key, generation)
        for piece in news
        if piece.removed
        for key, generation in zip(piece.removed.keys, piece.removed.generations, strict=True)
    }


def news_among(rows: Entries, known: Spread[None], latest_us: int) -> npt.NDArray[np.bool_]:
    """Which added rows are not known, which removed ones are. What was added lately is always told:
    it may be another object than the one that is known, or was when `known` was asked."""
    added: npt.NDArray[np.bool_] = rows["kind"] == ADDED
    keys, generations = manifest.keys_of(rows), rows["generation"].tolist()
    marks = [mark(key, gen) for key, gen in zip(keys, generations, strict=True)]
    same = [found in known.part(found) for found in marks]
    news: npt.NDArray[np.bool_] = np.array(same, bool) != added
    news |= added & (rows["time_us"] + _LATELY_US > latest_us)
    return news
