"""What became of blocks that are not found: the last fates of keys, remembered within a bound.

Whoever takes a block out of a tier, or does not write it into one, tells the `MissLedger`. That
costs some microseconds a batch. When a request misses a block, the ledger says which of these was
the reason. What left the tiers longer ago than the ledger remembers, or before this process began,
cannot be told from what was never computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.types import BlockKey, Fate, MissReason, Outcome

ROWS_MIN, ROWS_MAX = 1 << 14, 1 << 19
"""Of a ledger: 0.3 to 9 MiB."""
_ROWS_A_BLOCK = 2
_TICKS_A_SECOND = 10

Hashes = npt.NDArray[np.uint64]


class HashRing:
    """Facts about hashes, the last so many: the oldest is overwritten first.

    A row has a part of its hash, its time, its fact, and the number of the row before it in the
    same bucket. One that was overwritten is younger than the row that points to it, which ends the
    walk. Rows are numbered from 1 there, so that memory of zeros is an empty ring.
    """

    def __init__(self, rows: int) -> None:
        """`rows` is a power of two."""
        self._rows = rows
        self._heads = np.zeros(rows, np.uint32)
        self._before = np.zeros(rows, np.uint32)
        self._tags = np.zeros(rows, np.uint32)
        self._times = np.zeros(rows, np.uint32)
        self._facts = np.zeros(rows, np.uint16)
        self._added = 0

    @property
    def since(self) -> float:
        """The time of the oldest row; 0 if none was overwritten yet."""
        if self._added <= self._rows:
            return 0.0
        return float(self._times[self._added % self._rows]) / _TICKS_A_SECOND

    def add(self, hashes: Hashes, fact: int, at: float) -> None:
        """The same fact about all of these, at this time."""
        mask = self._rows - 1
        for start in range(0, len(hashes), self._rows):
            some = hashes[start : start + self._rows]
            rows = np.arange(self._added, self._added + len(some)) & mask
            buckets = some & np.uint64(mask)
            self._before[rows] = self._heads[buckets]
            self._heads[buckets] = rows + 1
            self._tags[rows] = some >> np.uint64(32)
            self._times[rows] = int(at * _TICKS_A_SECOND)
            self._facts[rows] = fact
            self._added += len(some)
            # Of several in one bucket only the last is at its head now.
            for behind in np.flatnonzero(self._heads[buckets] != rows + 1).tolist():
                row, head = rows[behind], self._heads[buckets[behind]] - 1
                self._before[row] = self._before[head]
                self._before[head] = row + 1

    def find(self, one: int) -> Iterator[tuple[int, float]]:
        """What is known of a hash, the newest first: facts and their times."""
        tag, mask = one >> 32, self._rows - 1
        row, last_age = int(self._heads[one & mask]) - 1, -1
        while row >= 0:
            age = (self._added - 1 - row) & mask
            if age <= last_age:
                return
            last_age = age
            if int(self._tags[row]) == tag:
                yield int(self._facts[row]), float(self._times[row]) / _TICKS_A_SECOND
            row = int(self._before[row]) - 1


def hashes_of(keys: Collection[BlockKey]) -> Hashes:
    """Python's own hashes, which keys that were looked up have already."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)


class Past(NamedTuple):
    """Something that became of a block."""

    fate: Fate
    tier: int
    seconds: float
    """So long ago."""


class Cause(NamedTuple):
    """Why a block is not found, and what is known of it."""

    reason: MissReason | None
    """None if a tier gives it."""
    tier: int | None = None
    past: Past | None = None
    besides: Past | None = None


_FATES = tuple(Fate)
_CODE = {fate: code for code, fate in enumerate(_FATES)}
_OF_OUTCOMES: Mapping[Outcome, Fate] = {
    Outcome.CORRUPT: Fate.CORRUPT,
    Outcome.GONE: Fate.ELSEWHERE,
    Outcome.IO_ERROR: Fate.UNREADABLE,
}


class MissLedger:
    """Remembers of keys which tier they left, or did not get into, when and why. For one thread,
    like the chain."""

    def __init__(self, blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """For tiers of so many blocks."""
        wanted = min(max(_ROWS_A_BLOCK * blocks, ROWS_MIN), ROWS_MAX)
        self._ring = HashRing(1 << (wanted - 1).bit_length())
        self._clock, self._began = clock, clock()
        self.on = True
        """Whether anything is remembered."""

    @property
    def horizon(self) -> float:
        """For how many seconds back everything is remembered."""
        return self._now() - self._ring.since

    def _now(self) -> float:
        return self._clock() - self._began

    def note(self, tier: int, keys: Collection[BlockKey], fate: Fate) -> None:
        """This has become of these blocks in a tier."""
        if keys and self.on:
            self._ring.add(hashes_of(keys), tier << 8 | _CODE[fate], self._now())

    def note_failed(self, tier: int, failed: Mapping[BlockKey, Outcome]) -> None:
        """A tier does not offer these any more, because their loads have ended so."""
        for outcome in set(failed.values()):
            if (fate := _OF_OUTCOMES.get(outcome)) is not None:
                self.note(tier, [key for key in failed if failed[key] is outcome], fate)

    def history(self, key: BlockKey) -> Iterator[Past]:
        """What has become of a block, the latest first."""
        now = self._now()
        for fact, at in self._ring.find(hash(key) & 0xFFFFFFFFFFFFFFFF):
            yield Past(_FATES[fact & 0xFF], fact >> 8, max(0.0, now - at))


def last_loss(history: Iterable[Past]) -> tuple[Past, Past | None] | None:
    """Why no tier has a block that has this history; and what else there is to say of it. None
    without a history.

    The last tier that it left says so. But if a lower one could have had it still, and was not
    given it, or if it was to be stored once more since, that is why. A tier that the block has left
    must have had it: what went before counts no more.
    """
    left: Past | None = None
    tiers_left: set[int] = set()
    unwritten: Past | None = None
    for past in history:
        if not past.fate.unwritten:
            left = left or past
            tiers_left.add(past.tier)
        elif past.tier not in tiers_left and (left is None or past.tier > left.tier):
            unwritten = unwritten or past
    if unwritten is None:
        return None if left is None else (left, None)
    if left is None or left.seconds > unwritten.seconds or left.fate.reason is MissReason.EVICTED:
        return unwritten, left
    return left, None
