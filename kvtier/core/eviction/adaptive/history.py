"""What is remembered of blocks after they have gone: a table of fixed size over sampled keys."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.core.eviction.adaptive.reuse_forecast import AGE_STARTS, AGES, Forecast, age_positions

SAMPLED_IN = 4
"""One key in so many is watched, chosen by its fingerprint; a power of two."""
_SAMPLE_BITS = SAMPLED_IN.bit_length() - 1
_CELLS_A_SLOT = 2
"""What is popular at random times is told from what is not by uses that lie far apart: with half as
many cells it was forgotten between two of them."""
_CELLS_MIN = 3 << 13
_MEMORY_MIN = 1 << 14
_CENSUS_CELLS = _CELLS_MIN
"""At most so many cells are counted at once."""
_CENSUSES = 12
"""A wait counts half when it is as long as it took to count so many times."""
_EMPTY = 0


class History:
    """One cell for each sampled fingerprint that maps to it: the newest wins, the older is lost.

    So it remembers about `SAMPLED_IN` times as many blocks as it has cells, resident or not, at 11
    bytes a cell. Times are kept relative to the first one seen, in 32 bits.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._reused, self._lost = forecast.reused, forecast.lost
        self._counted_at: deque[float] = deque(maxlen=_CENSUSES)
        self._reset(_CELLS_MIN)

    def _reset(self, cells: int) -> None:
        self.cells = cells
        self._forecast.memory = max(cells // _CELLS_A_SLOT, _MEMORY_MIN)
        # Parts of equal size: a small one at the end would say next to nothing of all.
        self._census = -(-cells // -(-cells // _CENSUS_CELLS))
        self._census_at = 0
        self.tags = array("I", bytes(4 * cells))
        self.times = array("f", bytes(4 * cells))
        self.kinds = bytearray(cells)
        self.marks = bytearray(cells)
        self.rests = bytearray(cells)

    @property
    def nbytes(self) -> int:
        return self.cells * 11

    def resize(self, slots: int) -> None:
        """Have two cells for each slot; what was remembered stays where it still maps.

        Half as many again as before at least: a tier that grows slab by slab calls for each, and
        must not move everything each time.
        """
        wanted = _CELLS_A_SLOT * slots
        if wanted <= self.cells:
            return
        before = self._columns()
        self._reset(max(wanted, self.cells * 3 // 2))
        tags = before[0]
        cells = np.flatnonzero(tags != _EMPTY)
        places = (tags[cells] >> _SAMPLE_BITS) % self.cells
        for old, new in zip(before, self._columns(), strict=True):
            new[places] = old[cells]

    def _columns(self) -> list[NDArray[Any]]:
        return [
            np.frombuffer(self.tags, np.uint32),
            np.frombuffer(self.times, np.float32),
            *(np.frombuffer(each, np.uint8) for each in (self.kinds, self.marks, self.rests)),
        ]

    def sample(self, prints: Iterable[int]) -> list[tuple[int, int, int]]:
        """Which of these fingerprints are watched: (index, cell, tag)."""
        mask, cells = SAMPLED_IN - 1, self.cells
        return [
            (index, (tag >> _SAMPLE_BITS) % cells, tag)
            for index, tag in enumerate(prints)
            if not tag & mask and tag != _EMPTY
        ]

    def write(self, cell: int, tag: int, time: float, kind: int, mark: int, rest: int) -> None:
        """A watched block is used now: what it was waiting for has happened, or is lost."""
        before = self.tags[cell]
        if before != _EMPTY:
            ended = self._reused if before == tag else self._lost
            ended.note(self.kinds[cell], time - self.times[cell])
        self.tags[cell] = tag
        self.times[cell] = time
        self.kinds[cell] = kind
        self.marks[cell] = mark
        self.rests[cell] = rest

    def waiting(self, now: float, kinds: int) -> NDArray[np.float64]:
        """How many watched blocks wait, by kind and age; in a large table a part stands for all.

        What has waited for long counts less and less, as what was counted once is halved: else a
        table that remembers for long learns late that the workload has changed.
        """
        part = slice(self._census_at, self._census_at + self._census)
        tags = np.frombuffer(self.tags, dtype=np.uint32)[part]
        ages = now - np.frombuffer(self.times, dtype=np.float32)[part].astype(np.float64)
        cell = np.frombuffer(self.kinds, dtype=np.uint8)[part].astype(np.intp)
        cell *= AGES
        cell += age_positions(ages).astype(np.intp)
        cell[tags == _EMPTY] = kinds * AGES
        counts = np.bincount(cell, minlength=kinds * AGES)[: kinds * AGES].reshape(kinds, AGES)
        self._census_at += self._census
        if self._census_at >= self.cells:
            self._census_at = 0
        return counts * (self._weights(now) * (self.cells / len(tags)))

    def _weights(self, now: float) -> NDArray[np.float64]:
        """How much a wait counts, by its age."""
        self._counted_at.append(now)
        passed = now - self._counted_at[0]
        if len(self._counted_at) < _CENSUSES or passed <= 0:
            return np.ones(AGES)
        weights: NDArray[np.float64] = 0.5 ** (AGE_STARTS / passed)
        return weights
