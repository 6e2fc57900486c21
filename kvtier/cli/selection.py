"""Which blocks a copy takes, and how they are read: in columns, some seventy bytes a block.

They are read as anybody may read: a running engine there does not notice. To a mover the reader is
one more handler, so that blocks go straight from their medium into the memory from which they are
written, proved on the way, and both sides are always busy.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.cli.inspect import Inspectors
from kvtier.inspect import Source
from kvtier.inspect.filling import ROW, Rows
from kvtier.interfaces.handler import Handler
from kvtier.record.record import Buffer, record_bytes
from kvtier.slab.layout import keys_of
from kvtier.types import (
    GROUP_BYTES,
    KEY_BYTES_MAX,
    BlockKey,
    LoadStoreSpec,
    Namespace,
    Outcome,
    SlotSpec,
)

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

    def pieces(self, size: int) -> Iterator[tuple[list[BlockKey], list[int]]]:
        """Keys and their rows, so many at once."""
        for start in range(0, len(self), size):
            keys = self.keys(start, start + size)
            yield keys, list(range(start, start + len(keys)))

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


class Numbers(SlotSpec):
    """Blocks by their rows in a choice."""


class ChoiceReader(Handler):
    """Reads the rows of a choice from their sources. What cannot be read is GONE or CORRUPT,
    nothing else: a copy tells troubles of its source from those of its target by that."""

    def __init__(self, choice: Choice, namespace: Namespace) -> None:
        self.unread = 0
        """So many of those that are called CORRUPT could not be read at all."""
        self._counting = threading.Lock()
        self._choice = choice
        record = record_bytes(namespace.payload_bytes)
        for source in choice.sources:
            source.open(namespace)
        self.concurrency = max((each.concurrency for each in choice.sources), default=1)
        batches = [each.batch_blocks(record) for each in choice.sources]
        self.batch_blocks = min(batches, default=1)

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        assert isinstance(spec, Numbers)
        outcomes = self.read(spec.slots, keys, into)
        for index, outcome in enumerate(outcomes):
            if outcome not in (Outcome.OK, Outcome.GONE, Outcome.CORRUPT):
                outcomes[index] = Outcome.CORRUPT
                with self._counting:
                    self.unread += 1
        return outcomes

    def read(
        self, rows: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        """Fill each buffer with a record, unproved."""
        origins, places = self._choice.places(rows)
        outcomes: list[Outcome] = []
        for origin, neighbours in groupby(origins):
            some = slice(len(outcomes), len(outcomes) + len(list(neighbours)))
            source = self._choice.sources[origin]
            outcomes += source.read(places[some], keys[some], into[some])
        return outcomes

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        raise TypeError("a source is only read")

    def used_again(self, row: int, key: BlockKey) -> bool:
        """Whether a block that could not be proved has been replaced by another meanwhile."""
        (origin,), (at,) = self._choice.places([row])
        return self._choice.sources[origin].used_again(at, key)

    def close(self) -> None:
        for source in self._choice.sources:
            source.close()
