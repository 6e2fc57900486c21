"""What outlived an earlier process, in the order in which the tiers below should have it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from heapq import heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from kvtier.core.slab import layout
from kvtier.interfaces.tier import Tier
from kvtier.types import BlockKey

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
            self.add_piece(_Piece(slots, used_at, uses))

    def add_piece(self, piece: _Piece) -> None:
        """The same, in order already."""
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


class RecoveringTier(Tier):
    """A tier over numbered slots that knows which of them outlived an earlier process."""

    _where: dict[BlockKey, int]
    _key_of: list[BlockKey | None]

    def __init__(self) -> None:
        self._survivors = Survivors()
        self._hottest: Survivors | None = Survivors()
        """The same once more, for the tier above."""

    def _survived(self, slots: Slots, used_at: Times, uses: Uses) -> None:
        """As `Survivors.add`, for the tiers below and above."""
        if len(slots):
            piece = _Piece(slots, used_at, uses)
            self._survivors.add_piece(piece)
            if self._hottest is not None:
                self._hottest.add_piece(copy(piece))

    @property
    def recovered(self) -> int:
        return len(self._survivors)

    def take_recovered(self, count: int) -> tuple[Sequence[BlockKey], Sequence[int]]:
        return self._still_here(*self._survivors.take(count))

    def take_hottest(self, count: int) -> Sequence[BlockKey]:
        hottest = self._hottest
        return self._still_here(*hottest.take(count))[0] if hottest else []

    def _still_here(
        self, slots: Sequence[int], used: Sequence[int]
    ) -> tuple[Sequence[BlockKey], Sequence[int]]:
        key_of, where = self._key_of, self._where
        keys: list[BlockKey] = []
        uses: list[int] = []
        for slot, count in zip(slots, used, strict=True):
            key = key_of[slot]
            if key is not None and where.get(key) == slot:
                keys.append(key)
                uses.append(count)
        return keys, uses

    def forget_recovered(self) -> None:
        self._survivors.clear()

    def forget_hottest(self) -> None:
        self._hottest = None
