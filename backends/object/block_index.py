"""What is recorded of one namespace, looked up by object and changed in place.

For five million blocks this takes some 80 bytes each. A dict would take three times as much, and
would stop all other threads while it grows. So numpy looks objects up, many at a time, because it
sorts and searches without the GIL. Only what came since the last sorting is in a dict.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.manifests import (
    ADDED,
    ENTRY,
    REMOVED,
    Entries,
    merge,
    object_prints,
    same_objects,
)

_UNSORTED_MIN = 4096
_UNSORTED_SHARE = 8
_ROOM_MIN = 1024


class BlockIndex:
    """The latest entry about every object of a namespace."""

    def __init__(self, entries: Entries) -> None:
        """`entries` are merged."""
        self.bytes = 0
        """Of all blocks that are there."""
        self._rows = np.zeros(0, ENTRY)
        self._count = 0
        self._prints = np.zeros(0, np.uint64)
        self._order = np.zeros(0, np.uint32)
        self._unsorted: dict[int, int] = {}
        """By fingerprint, the rows that came since they were sorted."""
        self._replace(entries)

    def _replace(self, entries: Entries) -> None:
        self._rows, self._count = entries, len(entries)
        self.bytes = int(entries["size"][entries["kind"] == ADDED].sum())
        self._sort()

    def _sort(self) -> None:
        prints = object_prints(self.entries)
        self._order = np.argsort(prints).astype(np.uint32)
        self._prints = prints[self._order]
        self._unsorted.clear()

    @property
    def entries(self) -> Entries:
        """A view of all entries; rows stay where they are until `forget_removed`."""
        return self._rows[: self._count]

    def blocks(self) -> Entries:
        """The entries of all blocks that are there."""
        found: Entries = self.entries[self.entries["kind"] == ADDED]
        return found

    def find(self, objects: Entries) -> npt.NDArray[np.intp]:
        """The row of the entry about each of these objects, -1 if there is none."""
        if not self._count or not len(objects):
            return np.full(len(objects), -1)
        prints = object_prints(objects)
        rows = np.full(len(objects), -1)
        if len(self._prints):
            at = np.minimum(np.searchsorted(self._prints, prints), len(self._prints) - 1)
            same = self._prints[at] == prints
            rows[same] = self._order[at[same]]
        if self._unsorted:
            late = np.flatnonzero(rows < 0)
            rows[late] = [self._unsorted.get(each, -1) for each in prints[late].tolist()]
        rows[~same_objects(self.entries[rows], objects)] = -1
        return rows

    def apply(self, entries: Entries) -> int:
        """Take in entries, of which the latest counts; returns the bytes of objects that went."""
        if not len(entries):
            return 0
        entries = merge([entries])
        rows = self.find(entries)
        known = rows >= 0
        before, after = self.entries[rows[known]], entries[known]
        # of two with the same time the removal counts, because it is the safer one
        newer = (after["time_us"] > before["time_us"]) | (
            (after["time_us"] == before["time_us"]) & (after["kind"] > before["kind"])
        )
        before, after = before[newer], after[newer]
        after["used_s"] = np.maximum(after["used_s"], before["used_s"])
        was, now = before["kind"] == ADDED, after["kind"] == ADDED
        self.bytes += int(after["size"][now].sum()) - int(before["size"][was].sum())
        self._rows[rows[known][newer]] = after
        self._append(entries[~known])
        return int(before["size"][was & ~now].sum())

    def _append(self, entries: Entries) -> None:
        start, end = self._count, self._count + len(entries)
        if end > len(self._rows):
            room = np.zeros(max(end + end // 4, _ROOM_MIN), ENTRY)
            room[:start] = self.entries
            self._rows = room
        self._rows[start:end] = entries
        self._count = end
        self.bytes += int(entries["size"][entries["kind"] == ADDED].sum())
        prints = object_prints(entries).tolist()
        self._unsorted.update(zip(prints, range(start, end), strict=True))
        if len(self._unsorted) > max(_UNSORTED_MIN, end // _UNSORTED_SHARE):
            self._sort()

    def note_uses(self, uses: Entries) -> None:
        """These blocks were used at these times."""
        rows = self.find(uses)
        found = rows >= 0
        times = (uses["time_us"][found] // 1_000_000).astype(np.uint32)
        entries = self.entries
        entries["used_s"][rows[found]] = np.maximum(entries["used_s"][rows[found]], times)

    def forget_removed(self, before_us: int) -> None:
        """Forget what was removed before: its objects are gone for certain."""
        entries = self.entries
        old = (entries["kind"] == REMOVED) & (entries["time_us"] < before_us)
        if old.any():
            self._replace(entries[~old])
