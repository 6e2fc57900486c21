"""Which blocks are written within a budget: those that will earn the most hits for their bytes.

What is offered is counted by kind. From time to time the kinds are put in the order of what a block
of each earns, and the best are admitted, as many as the budget lasts for; of the kind that it does
not reach for whole, a part, chosen by prompt. What is left of the budget is spread over the time
ahead: so the longer nothing was written, the more kinds are admitted, in the end all.
"""

from __future__ import annotations

import math
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


SPREAD_S = 900.0
"""What is left is spent within so long. In the long run a quarter of an hour's worth stays, which a
burst may take at once."""
_MEMORY_S = 300.0
"""What was offered longer ago counts less and less."""
_EVERY_S = 1.0
_EVERY_OFFERED = 1024


class DynamicAdmission:
    """Decides for the way into one tier; for one thread."""

    def __init__(self, blocks: int) -> None:
        """For tiers of so many blocks."""
        self.earned = EarnedHits(blocks)
        self._offered = [0.0] * KINDS
        self._shares = [0.0] * KINDS
        self._at: float | None = None
        self._next = -math.inf
        self._until_next = 0

    def select(
        self, keys: Sequence[BlockKey], room: float, now: float, uses: Sequence[int] = ()
    ) -> list[BlockKey]:
        """Those of the blocks offered that are to be written, where `room` more may be soon.
        Neighbours of a prompt share their lot, as none is of use without those before it."""
        if not keys:
            return []
        kind_of = self.earned.kind
        counts = uses or [1] * len(keys)
        kinds = [kind_of(key, count) for key, count in zip(keys, counts, strict=True)]
        for kind in kinds:
            self._offered[kind] += 1
        self._until_next -= len(keys)
        if now >= self._next or self._until_next <= 0:
            self._choose(room, now)
        return self._admitted(keys, kinds)

    def admitted(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those that would be written now, of blocks that were offered before."""
        return self._admitted(keys, [self.earned.kind(key) for key in keys])

    def _admitted(self, keys: Sequence[BlockKey], kinds: Sequence[int]) -> list[BlockKey]:
        shares = self._shares
        chance = (zlib.crc32(keys[0]) * 2654435761 & 0xFFFFFFFF) / 2**32 if keys else 0.0
        return [key for key, kind in zip(keys, kinds, strict=True) if chance < shares[kind]]

    def _choose(self, room: float, now: float) -> None:
        """Which share of each kind is admitted from now on."""
        if self._at is not None and now > self._at:
            fading = math.exp((self._at - now) / _MEMORY_S)
            self._offered = [fading * count for count in self._offered]
        self._at = now if self._at is None else max(now, self._at)
        self._next, self._until_next = self._at + _EVERY_S, _EVERY_OFFERED
        # So many blocks as are remembered to have been offered may be written in as long a time.
        left = room * _MEMORY_S / SPREAD_S
        worth = self.earned.worth()
        for kind in sorted(range(KINDS), key=worth.__getitem__, reverse=True):
            offered = self._offered[kind]
            self._shares[kind] = min(1.0, left / max(1.0, offered))
            left = max(0.0, left - offered)
