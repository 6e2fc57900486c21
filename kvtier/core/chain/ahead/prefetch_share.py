"""How much of host memory prefetches may hold: less, the more of them were not used."""

from __future__ import annotations

LEAST = 1 / 16
"""So much of the share is left at least: else nobody would find out that prefetches pay again."""


class PrefetchShare:
    """A number of blocks, and how much of it is trusted.

    As many blocks as it may be at most are remembered, used or wasted, and what lies further back
    fades. So a burst of wrong prefetches lowers it within as many blocks as it may hold, and
    as many right ones bring it back.
    """

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._used, self._wasted = float(blocks), 0.0

    def used(self, blocks: int) -> None:
        """A load took so many that were prefetched."""
        self._used += blocks
        self._fade()

    def wasted(self, blocks: int) -> None:
        """So many were moved for nothing."""
        self._wasted += blocks
        self._fade()

    def _fade(self) -> None:
        known = self._used + self._wasted
        if known > self._most:
            self._used *= self._most / known
            self._wasted *= self._most / known

    @property
    def trust(self) -> float:
        """How likely it is that a block which is prefetched now will be used."""
        known = self._used + self._wasted
        return max(LEAST, self._used / known) if known else 0.0

    @property
    def blocks(self) -> int:
        """How many may be held now; one at least, unless it was none from the start."""
        return max(min(1, self._most), int(self._most * self.trust))
