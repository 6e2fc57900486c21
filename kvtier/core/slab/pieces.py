"""The pieces in which a device is given host memory, and the order in which it gets them.

Scheduler and workers work it out by themselves, from the same table: what a worker has done so far
is then a number.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.slab.layout import SlabHeader, committed, last_used

PIECE_BYTES = 64 << 20
"""Drivers and kernels have refused large ranges."""


def pieces_of(
    slots: int,
    slot_bytes: int,
    first_at: int,
    piece_bytes: int = PIECE_BYTES,
    page_bytes: int = mmap.PAGESIZE,
) -> Iterator[range]:
    """Neighbouring slots, the first of all at such an address. A piece ends where a slot does, so
    that no copy crosses from one into the next, and where a page of the system does, because a
    driver pins whole pages, and refuses one that it has: all that is left, if no slot does so."""
    step, at = max(piece_bytes // slot_bytes, 1), 0
    while at < slots:
        end = at + step
        while end < slots and (first_at + end * slot_bytes) % page_bytes:
            end += 1
        yield range(at, min(end, slots))
        at = end


def pinning_order(
    header: SlabHeader, entries: npt.NDArray[np.void], pieces: Sequence[range] | None = None
) -> list[range]:
    """A region's pieces, those first whose blocks were used most, and last. Of all others the first
    ones: new blocks go where this begins."""
    if pieces is None:
        pieces = list(pieces_of(header.slots, header.slot_bytes, header.data_at))
    valid = committed(entries)
    uses = np.zeros(header.slots, np.int64)
    used = np.zeros(header.slots)
    uses[valid], used[valid] = entries["uses"][valid], last_used(entries)[valid]
    begins = np.array([piece.start for piece in pieces])
    most, latest = np.add.reduceat(uses, begins), np.maximum.reduceat(used, begins)
    order = np.lexsort((begins, -latest, -most))
    return [pieces[at] for at in order.tolist()]


def place_of(order: Sequence[range], slots: int) -> npt.NDArray[np.int32]:
    """Where in this order each slot comes."""
    places = np.zeros(slots, np.int32)
    at = 0
    for piece in order:
        places[piece.start : piece.stop] = np.arange(at, at + len(piece))
        at += len(piece)
    return places
