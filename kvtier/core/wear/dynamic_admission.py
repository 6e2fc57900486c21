"""Which blocks are written within a budget: those that will earn the most hits for their bytes.

What is offered is counted by kind. From time to time the kinds are put in the order of what a block
of each earns, and the best are admitted, as many as the budget lasts for; of the kind that it does
not reach for whole, a part, chosen by prompt. What is left of the budget is spread over the time
ahead: so the longer nothing was written, the more kinds are admitted, in the end all.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from kvtier.core.wear.earned_hits import KINDS, EarnedHits
from kvtier.types import BlockKey

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
