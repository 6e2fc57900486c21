"""What is written down about the objects of a namespace, against what a tier offers.

Of five million blocks this takes 80 bytes each. A dict of them would take three times as much, and
stop all other threads when it grows; so objects are looked for here many at a time, by numpy,
which sorts and searches without Python's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.housekeeping.lock_yield import CHUNK, LockYield
from kvtier.backends.object.housekeeping.tombstones import Object
from kvtier.backends.object.housekeeping.updates import Updates
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.manifest import ADDED, ENTRY, Entries

_LATELY_US = 600_000_000


class Reconciliation:
    """Merged entries, found by their objects."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self.known = np.zeros(len(entries), np.bool_)
        """Of which of them the objects are offered."""
        self.beside = np.zeros(0, ENTRY)
        """What is offered though nothing is written down about it: entries of no kind."""
        marks = manifest.marks(entries, entries["generation"])
        self._order = np.argsort(marks).astype(np.uint32)
        self._marks = marks[self._order]

    def find(self, objects: Entries) -> npt.NDArray[np.intp]:
        """The row of each of these objects, -1 if nothing is written down about it."""
        if not len(self.entries):
            return np.full(len(objects), -1)
        at = np.searchsorted(self._marks, manifest.marks(objects, objects["generation"]))
        rows = self._order[np.minimum(at, len(self._order) - 1)].astype(np.intp)
        rows[~manifest.same_objects(self.entries[rows], objects)] = -1
        return rows

    def compare(self, known: Iterable[Object], news: Sequence[Updates], breathe: LockYield) -> None:
        """Take in what is offered (`known`), but for what is told to be gone in `news`."""
        offered = iter(known)
        beside = [self.beside]
        breathe.begin()
        while some := list(islice(offered, CHUNK)):
            objects = manifest.objects_of(*zip(*some, strict=True))
            rows = self.find(objects)
            self.known[rows[rows >= 0]] = True
            if rows.min() < 0:
                beside.append(objects[rows < 0])
            breathe()
        self.beside = np.concatenate(beside)
        for gone in filter(None, (piece.removed for piece in news)):
            rows = self.find(manifest.objects_of(gone.keys, gone.generations))
            self.known[rows[rows >= 0]] = False
            breathe()

    def expect(self, waiting: Entries) -> None:
        """What waits to be written down is as young as the latest of it, and all else about which
        nothing is written down as old as can be."""
        marks = manifest.marks(self.beside, self.beside["generation"])
        young = np.isin(marks, manifest.marks(waiting, waiting["generation"]))
        self.beside["time_us"][young] = waiting["time_us"].max(initial=0)

    def news(self, piece: slice, latest_us: int) -> npt.NDArray[np.bool_]:
        """Which of these entries are news where these objects are known: what was added and is not
        known, what was removed and is. What was added lately always is: it may be another object
        than the one that is known, or was when that was asked."""
        rows = self.entries[piece]
        added = rows["kind"] == ADDED
        news: npt.NDArray[np.bool_] = self.known[piece] != added
        news |= added & (rows["time_us"] + _LATELY_US > latest_us)
        return news
