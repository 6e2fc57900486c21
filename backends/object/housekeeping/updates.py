"""What a keeper tells its tier, a little at a time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object.budget.budget import Grant
from kvtier.backends.object.lock_yield import LockYield
from kvtier.backends.object.manifests.block_rows import Rows, rows_of
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries
from kvtier.backends.object.object_names import ObjectKey

OfferedBlocks = Callable[[], Iterator[ObjectKey]]
"""Iterates over all blocks that a tier offers, from any thread."""


class Update(msgspec.Struct):
    """Something that the tier does not know yet."""

    added: Rows | None = None
    """Blocks that are there."""
    removed: Rows | None = None
    """Blocks that are gone."""
    deleted: list[int] = []
    """Slots whose objects are deleted."""
    recatalogued: int = 0
    """So many of the uncatalogued bytes are among the blocks that follow."""
    grant: Grant | None = None
    """What we may use; everything that others had recorded before is among earlier updates."""


class UpdateQueue:
    """Updates that wait until the tier takes them in."""

    def __init__(self, lock_yield: LockYield) -> None:
        self.updates: deque[Update] = deque()
        self._lock_yield = lock_yield
        self._last_grant = Update()

    def entries(
        self, entries: Entries, chosen: Callable[[slice], npt.NDArray[np.bool_]] | None = None
    ) -> None:
        """Recorded entries, or those of each piece that are `chosen`."""
        for kind in (REMOVED, ADDED):
            for piece in self._lock_yield.chunks(len(entries)):
                some = entries["kind"][piece] == kind
                if chosen is not None:
                    some &= chosen(piece)
                if some.any():
                    self.rows(kind, rows_of(entries[piece][some]))

    def rows(self, kind: int, rows: Rows) -> None:
        self.updates.append(Update(added=rows) if kind == ADDED else Update(removed=rows))

    def deleted(self, slots: list[int]) -> None:
        self.updates.append(Update(deleted=slots))

    def grant(self, grant: Grant) -> None:
        """Replaces the last grant if that is still the last in the queue: an idle tier may not ask
        for days."""
        with contextlib.suppress(IndexError):
            if self.updates[-1] is self._last_grant:
                self._last_grant.grant = grant
                return
        self._last_grant = Update(grant=grant)
        self.updates.append(self._last_grant)
