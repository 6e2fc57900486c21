"""What a keeper tells its tier, a little at a time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object.budget.budget import Standing
from kvtier.backends.object.housekeeping.lock_yield import LockYield
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries
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


class Updates(msgspec.Struct):
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


class UpdateQueue:
    """Where a keeper leaves what it learns, until its tier takes it in."""

    def __init__(self, breath: LockYield) -> None:
        self.news: deque[Updates] = deque()
        self._lock_yield = breath
        self._last_standing = Updates()

    def entries(
        self, entries: Entries, chosen: Callable[[slice], npt.NDArray[np.bool_]] | None = None
    ) -> None:
        """What was written down, or of each piece of it what is `chosen`."""
        for kind in (REMOVED, ADDED):
            for piece in self._lock_yield.chunks(len(entries)):
                some = entries["kind"][piece] == kind
                if chosen is not None:
                    some &= chosen(piece)
                if some.any():
                    self.rows(kind, rows_of(entries[piece][some]))

    def rows(self, kind: int, rows: Rows) -> None:
        self.news.append(Updates(added=rows) if kind == ADDED else Updates(removed=rows))

    def freed(self, slots: list[int]) -> None:
        self.news.append(Updates(freed=slots))

    def standing(self, standing: Standing) -> None:
        """In place of the last one if nobody has listened since: it may be a quiet weekend."""
        with contextlib.suppress(IndexError):
            if self.news[-1] is self._last_standing:
                self._last_standing.standing = standing
                return
        self._last_standing = Updates(standing=standing)
        self.news.append(self._last_standing)
