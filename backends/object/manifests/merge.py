"""Merging manifests: of all entries about one object the latest counts.

The entries may be gigabytes. Each piece is freed as soon as it is copied, and only entries that are
out of order are held twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.manifests.manifest import ENTRY, Entries, fingerprints

_OPAQUE = np.dtype(f"V{ENTRY.itemsize}")
"""Whole entries without fields, which numpy moves several times as fast."""
_ROWS_AT_ONCE = 1 << 16


def merge(pieces: list[Entries]) -> Entries:
    """The latest entry of every object, oldest first. `pieces` is empty afterwards."""
    entries = _concatenate(pieces)
    # 64 bits stand for key and generation: a collision, once in 10^7 states of a million
    # objects, would forget one block
    prints = fingerprints(entries, entries["generation"])
    if not _unique(prints):
        latest = np.zeros(len(entries), np.bool_)
        latest[_latest_rows(prints, entries)] = True
        entries = _keep(entries, latest)
    del prints
    order = np.argsort(entries["time_us"], kind="stable")
    misplaced = order != np.arange(len(order))
    if misplaced.any():
        first = int(misplaced.argmax())
        moved = entries.view(_OPAQUE)
        moved[first:] = moved[order[first:]]
    return entries


def _concatenate(pieces: list[Entries]) -> Entries:
    """All entries, those of the oldest piece first."""
    pieces.sort(key=lambda piece: int(piece["time_us"][0]) if len(piece) else 0, reverse=True)
    whole = np.empty(sum(map(len, pieces)), _OPAQUE)
    end = 0
    while pieces:
        piece = np.ascontiguousarray(pieces.pop()).view(_OPAQUE)
        whole[end : end + len(piece)] = piece
        end += len(piece)
    return whole.view(ENTRY)


def _keep(entries: Entries, chosen: npt.NDArray[np.bool_]) -> Entries:
    """The chosen entries, moved to the front in place. They are copied if they are few."""
    whole = entries.view(_OPAQUE)
    end = 0
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        kept = whole[rows][chosen[rows]]
        whole[end : end + len(kept)] = kept
        end += len(kept)
    return entries[:end] if 2 * end > len(entries) else entries[:end].copy()


def _unique(prints: npt.NDArray[np.uint64]) -> bool:
    in_order = np.sort(prints)
    return bool((in_order[1:] != in_order[:-1]).all())


def _latest_rows(prints: npt.NDArray[np.uint64], entries: Entries) -> npt.NDArray[np.intp]:
    """The row of the latest entry of each object. Of two with the same time the removal counts,
    because it is the safer one."""
    order = np.lexsort((entries["kind"], entries["time_us"], prints))
    prints = prints[order]
    latest: npt.NDArray[np.intp] = order[np.append(prints[1:] != prints[:-1], True)]
    return latest
