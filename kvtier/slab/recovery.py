"""What outlived an earlier process, in the order in which the tiers below should have it."""

from __future__ import annotations

import contextlib
import ctypes
from copy import copy
from heapq import heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from kvtier.slab import layout

_PIECES_AT_ONCE = 32
"""From so many pieces at most one call takes slots: it runs between the steps of an engine."""
_RUN = 8
"""So many slots of a piece come in a row, though another has a hotter one in between: a time is
kept for each run alone."""
_USES_MAX = 255

Slots = npt.NDArray[np.integer]
Times = npt.NDArray[np.float64]
Uses = npt.NDArray[np.uint32]


class _Piece:
    """Slots of one slab, the hottest first."""

    __slots__ = ("_slots", "_times", "_uses", "at")

    def __init__(self, slots: Slots, used_at: Times, uses: Uses) -> None:
        order = layout.ends_first_order(used_at)[::-1]  # what eviction would take last
        self._slots = slots.astype(np.int32)[order]
        self._times = used_at[order[::_RUN]].astype(np.uint32)
        self._uses = np.minimum(uses, _USES_MAX).astype(np.uint8)[order]
        self.at = 0

    @property
    def time(self) -> int:
        """When the first of the next run was used."""
        return int(self._times[self.at // _RUN])

    def take(self, count: int, least: int) -> tuple[list[int], list[int]]:
        """The next slots, at most so many, up to the first run that was used before `least`; and
        how often each was used."""
        first = self.at // _RUN
        times = self._times[first + 1 : first + 1 + count // _RUN]
        stop = (first + 1 + int(np.count_nonzero(times >= least))) * _RUN
        part = slice(self.at, min(self.at + count, stop, len(self._slots)))
        self.at = part.stop
        return self._slots[part].tolist(), self._uses[part].tolist()

    def __len__(self) -> int:
        return len(self._slots) - self.at


class Survivors:
    """Slots whose blocks a process before this one has committed; some six bytes each."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, _Piece]] = []
        """By the time of the next slot, the latest first (a heap)."""
        self._added = 0
        self._left = 0

    def add(self, slots: Slots, used_at: Times, uses: Uses) -> None:
        """Slots of one slab, when each was used last and how often: the longest unused first, and
        each prompt from its head on."""
        if len(slots):
            self._add(_Piece(slots, used_at, uses))

    def add_all_of(self, other: Survivors) -> None:
        """What another has still to tell of; they share the memory for it."""
        for _, _, piece in other._pieces:
            self._add(copy(piece))

    def _add(self, piece: _Piece) -> None:
        self._added += 1
        self._left += len(piece)
        heappush(self._pieces, (-piece.time, self._added, piece))

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Some of those that were used last, at most so many, and how often each was used."""
        slots: list[int] = []
        uses: list[int] = []
        pieces = self._pieces
        for _ in range(_PIECES_AT_ONCE):
            if not pieces or len(slots) == count:
                break
            _, number, piece = pieces[0]
            least = max((-time for time, _, _ in pieces[1:3]), default=0)
            some, used = piece.take(count - len(slots), least)
            slots += some
            uses += used
            if len(piece):
                heapreplace(pieces, (-piece.time, number, piece))
            else:
                heappop(pieces)
        self._left -= len(slots)
        return slots, uses

    def clear(self) -> None:
        self._pieces.clear()
        self._left = 0

    def __len__(self) -> int:
        return self._left


def give_back_memory() -> None:
    """Return to the system what reading large tables has left free: the process would keep it, a
    third of all that it has."""
    with contextlib.suppress(AttributeError):  # a C library without it keeps what it has
        ctypes.CDLL(None).malloc_trim(0)
