"""What a block earns if it is written, learned from what became of blocks like it.

Blocks are alike that were used as often, in prompts as long. A block of a kind earns a hit if its
next use finds it no more in the memory above: only then the medium below is asked for it. That is
learned of all blocks, of those that were not written too.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from kvtier.types import BlockKey

_USES = 4
_LENGTHS = 9
KINDS = _USES * _LENGTHS
_KIND_MASK, _EXPECTED = 0x3F, 0x40
_CELLS_MIN, _CELLS_MAX = 1 << 14, 1 << 22
_MEMORY = float(1 << 16)
"""When so many uses were counted, all counts are halved: the old count less and less."""
_LEAN = 32.0
"""So many uses a kind needs before its own share counts more than that of all kinds."""
_HALF = 0.5


def kind_of(uses: int, length: int) -> int:
    """The kind of a block that was used so often, the last time in a prompt of so many blocks."""
    return min(uses, _USES) - 1 + _USES * min(length.bit_length(), _LENGTHS - 1)


class EarnedHits:
    """Remembers for a bounded number of blocks of which kind they are, five bytes each; and counts,
    by kind, how many were missed above when they were used again."""

    def __init__(self, blocks: int) -> None:
        """For tiers of so many blocks."""
        cells = _CELLS_MIN
        while cells < min(2 * blocks, _CELLS_MAX):
            cells *= 2
        self._mask = cells - 1
        self._tags = array("I", bytes(4 * cells))
        self._cells = bytearray(cells)
        self._seen = [0.0] * KINDS
        self._earned = [0.0] * KINDS

    @property
    def nbytes(self) -> int:
        """Memory that this holds."""
        return 5 * len(self._cells)

    def request(self, keys: Sequence[BlockKey], above: Sequence[bool]) -> None:
        """A request uses these blocks of its prompt, each of which the memory above has, or not."""
        tags, cells, mask = self._tags, self._cells, self._mask
        seen, earned = self._seen, self._earned
        first = kind_of(1, len(keys))
        for key, here in zip(keys, above, strict=True):
            tag = zlib.crc32(key)
            at = tag & mask
            kind = first
            if tags[at] == tag:
                before = cells[at] & _KIND_MASK
                if not here:
                    earned[before] += 1
                kind += min(before % _USES + 1, _USES - 1)
            tags[at] = tag
            # A load that follows is for this request: its hit has been counted.
            cells[at] = kind if here else kind | _EXPECTED
            seen[kind] += 1
        if sum(seen) > _MEMORY:
            self._seen = [_HALF * count for count in seen]
            self._earned = [_HALF * count for count in earned]

    def loaded(self, keys: Sequence[BlockKey]) -> None:
        """These came up from the medium below: ahead of their request, if that is still to come."""
        for key in keys:
            tag = zlib.crc32(key)
            at = tag & self._mask
            if self._tags[at] != tag:
                continue
            if not self._cells[at] & _EXPECTED:
                self._earned[self._cells[at]] += 1
            self._cells[at] &= _KIND_MASK

    def kind(self, key: BlockKey, uses: int = 1) -> int:
        """The kind of a block; of one that nobody remembers, by how often it is said to have been
        used."""
        tag = zlib.crc32(key)
        at = tag & self._mask
        if self._tags[at] == tag:
            return self._cells[at] & _KIND_MASK
        return kind_of(max(1, uses), 0)

    def worth(self) -> list[float]:
        """By kind, how many hits each block earns that is written."""
        mean = (sum(self._earned) + 1.0) / (sum(self._seen) + 2.0)
        # Until something is known, what was used more often is worth more.
        return [
            (self._earned[kind] + _LEAN * mean * (1 + kind % _USES) / _USES)
            / (self._seen[kind] + _LEAN)
            for kind in range(KINDS)
        ]
