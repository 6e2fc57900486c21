"""Which blocks are to be copied: in columns, some seventy bytes a block, however many there are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.cli.inspection.inspectors import Inspectors
from kvtier.inspect import Block, Source
from kvtier.inspect.filling import ROW, Rows
from kvtier.slab.layout import keys_of
from kvtier.types import GROUP_BYTES, KEY_BYTES_MAX, BlockKey

_PIECE = 1 << 16
USED_MAX = 1 << 16
"""A copy takes along how often blocks were used, but of no more than so many."""


class Choice:
    """Blocks of one namespace, each once, the most wanted first. `at` is where a block is in the
    words of its source."""

    def __init__(self, namespace: str, rows: Rows, sources: list[Source]) -> None:
        self.namespace = namespace
        self.sources = sources
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def room(self, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
        """The bytes that each of them takes where a block of a cache group takes so many (the last
        counts for all groups beyond). Where they lie now they may be compressed, or in slots."""
        if len(sizes) == 1:
            return np.full(len(self), sizes[0], np.int64)
        starts = range(0, len(self), _PIECE)
        groups = [_groups(self._rows[start : start + _PIECE]) for start in starts]
        known = np.minimum(np.concatenate([np.zeros(0, np.uint32), *groups]), len(sizes) - 1)
        taken: npt.NDArray[np.int64] = np.array(sizes, np.int64)[known]
        return taken

    def keys(self, start: int, stop: int) -> list[BlockKey]:
        """The keys of these rows."""
        return keys_of(self._rows[start:stop])

    def places(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where these rows are: the number of each one's source, and its place there."""
        chosen = self._rows[rows]
        return chosen["origin"].tolist(), chosen["at"].tolist()

    def cut(self, size_max: int, sizes: Sequence[int]) -> Choice:
        """The first blocks, up to so many bytes of room."""
        count = int(np.searchsorted(np.cumsum(self.room(sizes)), size_max, side="right"))
        return Choice(self.namespace, self._rows[:count].copy(), self.sources)

    def only(self, keys: Collection[BlockKey]) -> Choice:
        """Those of the blocks that have one of these keys."""
        chosen = [
            np.fromiter((key in keys for key in self.keys(start, start + _PIECE)), bool)
            for start in range(0, len(self), _PIECE)
        ]
        rows = self._rows[np.concatenate([np.zeros(0, bool), *chosen])]
        return Choice(self.namespace, rows, self.sources)

    def used(self) -> dict[BlockKey, tuple[int, float]]:
        """How often these were used and when last, without those that never were; of very many
        the most used."""
        rows = self._rows[self._rows["uses"] > 0]
        rows = rows[np.argsort(rows["uses"], kind="stable")[-USED_MAX:]]
        values = zip(rows["uses"].tolist(), rows["used_at"].astype(float).tolist(), strict=True)
        return dict(zip(keys_of(rows), values, strict=True))

    def blocks(self) -> Iterator[Block]:
        """One by one, as provers take them."""
        for start in range(0, len(self), _PIECE):
            rows = self._rows[start : start + _PIECE]
            for key, row in zip(keys_of(rows), rows, strict=True):
                source = self.sources[row["origin"]]
                block = Block(
                    tier=source.tier,
                    kind=source.kind,
                    namespace=self.namespace,
                    key=key,
                    bytes=int(row["bytes"]),
                    stored_at=float(row["stored_at"]),
                )
                yield source.block(int(row["at"]), block)


def choose(inspectors: Inspectors, namespace: str, *, hottest: bool = False) -> Choice:
    """All blocks of a namespace, the newest first, or the most used and of these the newest; of
    several copies the one in the first tier. What is written down was looked at, and is taken."""
    sources: list[Source] = []
    pieces: list[Rows] = [np.zeros(0, ROW)]
    for source in (source for each in inspectors for source in each.sources(namespace)):
        rows = source.rows()
        rows["origin"] = len(sources)
        pieces.append(rows)
        sources.append(source)
    rows = _once(np.concatenate(pieces))
    order = np.argsort(-rows["stored_at"], kind="stable")
    if hottest:
        order = order[np.argsort(-rows["uses"][order].astype(np.int64), kind="stable")]
    return Choice(namespace, rows[order], sources)


def _groups(rows: Rows) -> npt.NDArray[np.uint32]:
    """The cache group of each key: its last bytes."""
    keys = np.ascontiguousarray(rows["key"]).view(np.uint8).reshape(-1, KEY_BYTES_MAX)
    ends = rows["key_bytes"].astype(np.intp)[:, None] + np.arange(-GROUP_BYTES, 0)
    return np.take_along_axis(keys, ends, axis=1).view(">u4").ravel().astype(np.uint32)


def _once(rows: Rows) -> Rows:
    """Of the rows with one key the first source's, and there the latest."""
    words: Any = np.ascontiguousarray(rows["key"]).view("<u8").reshape(-1, KEY_BYTES_MAX // 8)
    columns = (-rows["stored_at"], rows["origin"], rows["key_bytes"], *words.T)
    order = np.lexsort(columns)
    same = np.ones(len(rows), bool)
    if len(rows):
        same[0] = False
        lengths = rows["key_bytes"][order]
        same[1:] = lengths[1:] == lengths[:-1]
        for word in words.T:
            ordered = word[order]
            same[1:] &= ordered[1:] == ordered[:-1]
    return rows[np.sort(order[~same])]
