"""Recorded entries against the blocks that a tier offers.

For five million blocks this takes 80 bytes each. A dict would take three times as much, and would
stop all other threads while it grows. So numpy looks objects up, many at a time, because it sorts
and searches without the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.lock_yield import CHUNK, LockYield
from kvtier.backends.object.manifests.block_rows import Rows
from kvtier.backends.object.manifests.manifest import (
    ADDED,
    ENTRY,
    Entries,
    fingerprints,
    objects_of,
    same_objects,
)
from kvtier.backends.object.object_names import ObjectKey

_LATELY_US = 600_000_000


class Reconciliation:
    """Merged entries, looked up by their objects."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.offered = np.zeros(len(entries), np.bool_)
        """For each entry, whether the tier offers its object."""
        self.unrecorded = np.zeros(0, ENTRY)
        """What the tier offers and no entry is about: entries of no kind."""
        prints = fingerprints(entries, entries["generation"])
        self._order = np.argsort(prints).astype(np.uint32)
        self._prints = prints[self._order]

    def find(self, objects: Entries) -> npt.NDArray[np.intp]:
        """The row of the entry about each of these objects, -1 if there is none."""
        if not len(self.entries):
            return np.full(len(objects), -1)
        prints = fingerprints(objects, objects["generation"])
        at = np.searchsorted(self._prints, prints)
        rows = self._order[np.minimum(at, len(self._order) - 1)].astype(np.intp)
        rows[~same_objects(self.entries[rows], objects)] = -1
        return rows

    def compare(
        self, offered: Iterable[ObjectKey], removed: Sequence[Rows], lock_yield: LockYield
    ) -> None:
        """Note what a tier offers, except for what it will soon hear to be removed."""
        objects_offered = iter(offered)
        unrecorded = [self.unrecorded]
        lock_yield.begin()
        while some := list(islice(objects_offered, CHUNK)):
            objects = objects_of(*zip(*some, strict=True))
            rows = self.find(objects)
            self.offered[rows[rows >= 0]] = True
            if rows.min() < 0:
                unrecorded.append(objects[rows < 0])
            lock_yield()
        self.unrecorded = np.concatenate(unrecorded)
        for piece in removed:
            rows = self.find(objects_of(piece.keys, piece.generations))
            self.offered[rows[rows >= 0]] = False
            lock_yield()

    def date_unrecorded(self, queued: Entries) -> None:
        """Give objects that are in `queued`, which waits to be recorded, the latest of its times,
        and all other unrecorded objects the time 0."""
        prints = fingerprints(self.unrecorded, self.unrecorded["generation"])
        young = np.isin(prints, fingerprints(queued, queued["generation"]))
        self.unrecorded["time_us"][young] = queued["time_us"].max(initial=0)

    def changes(self, piece: slice, latest_us: int) -> npt.NDArray[np.bool_]:
        """Which of these entries the tier must hear of: added objects that it does not offer, and
        removed ones that it does. Objects that were added lately always count, because the tier
        may offer another object of the same name, or may have offered it only when it was asked."""
        rows = self.entries[piece]
        added = rows["kind"] == ADDED
        changes: npt.NDArray[np.bool_] = self.offered[piece] != added
        changes |= added & (rows["time_us"] + _LATELY_US > latest_us)
        return changes
