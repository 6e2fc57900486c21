"""What passes between a tier, on the scheduler's thread, and its keeper: updates and an outbox."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec
import numpy as np

from kvtier.backends.object.budget import Budget
from kvtier.backends.object.gil_yield import GilYield
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import (
    ADDED,
    ENTRY,
    REMOVED,
    SKEW_US,
    Entries,
    merge,
    pack_entries,
    removals,
)
from kvtier.backends.object.object_names import ObjectKey
from kvtier.slab.layout import keys_of
from kvtier.types import BlockKey

_ENTRIES_MAX = 1 << 16
"""About so many go into one manifest, which must be written before the store's deadline."""

OfferedBlocks = Callable[[], Iterator[ObjectKey]]
"""Iterates over all blocks that a tier offers, from any thread."""


class Update(msgspec.Struct):
    """Blocks that are there, or that are gone, which the tier does not know yet. In columns; times
    in seconds since the epoch."""

    kind: int
    keys: list[BlockKey]
    generations: list[int]
    sizes: list[int]
    times: list[float]

    def __len__(self) -> int:
        return len(self.keys)


def enqueue(updates: deque[Update], entries: Entries, gil_yield: GilYield) -> None:
    """Hand recorded entries to the tier, in pieces that one of its calls can take in."""
    for kind in (REMOVED, ADDED):
        for piece in gil_yield.chunks(len(entries)):
            some = entries[piece][entries["kind"][piece] == kind]
            if len(some):
                columns = (some["generation"], some["size"], some["time_us"] / 1e6)
                updates.append(Update(kind, keys_of(some), *(each.tolist() for each in columns)))


class Outbox:
    """What a tier has added and removed, until a manifest lists it. `added` and `removed` are for
    the tier's thread, the rest for the keeper's."""

    def __init__(
        self,
        journal: Journal,
        budget: Budget,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        self._budget = budget
        self._clock = clock
        self._last_us = 0
        self._entries: deque[tuple[Entries, int, int]] = deque()
        """Entries to record, and how many reserved and dropped bytes each piece accounts for."""

    # -- time ------------------------------------------------------------------------------------

    def now_us(self) -> int:
        """Microseconds since the epoch, each time later than the last, and than all that is
        recorded."""
        self._last_us = max(self._last_us + 1, int(self._clock() * 1e6))
        return self._last_us

    def observe_time(self, at_us: int) -> None:
        """An entry of this time has been read. Later entries of ours get later times, whatever the
        clocks of others say, unless those are wrong beyond belief."""
        self._last_us = max(self._last_us, min(at_us, int(self._clock() * 1e6) + SKEW_US))

    # -- the tier's side -------------------------------------------------------------------------

    def added(
        self, keys: Sequence[BlockKey], generations: Sequence[int], sizes: Sequence[int]
    ) -> float:
        """Record soon that these blocks are there; since when, in seconds of the epoch."""
        now_us = self.now_us()
        entries = pack_entries(ADDED, keys, generations, sizes, now_us)
        self._entries.append((entries, sum(sizes), 0))
        return now_us / 1e6

    def removed(
        self,
        objects: Sequence[ObjectKey],
        *,
        reserved: int = 0,
        dropped: int = 0,
        known_s: float | None = None,
    ) -> None:
        """Record soon that these objects must not be found again: those of now, or those that were
        known at a time (of the epoch). So many bytes had been reserved for them, and so many are
        free when they are deleted."""
        self._budget.drop(dropped)
        at_us = self.now_us() if known_s is None else int(known_s * 1e6) + 2
        entries = removals(objects, at_us)
        for start in range(0, len(entries), _ENTRIES_MAX):
            sizes = (0, 0) if start else (reserved, dropped)
            self._entries.append((entries[start : start + _ENTRIES_MAX], *sizes))

    # -- the keeper's side -----------------------------------------------------------------------

    def record(self) -> None:
        """Record what is queued now; raises StoreError."""
        queued = len(self._entries)
        while queued:
            taken = self._next_manifest(queued)
            queued -= len(taken)
            number = self._journal.append(merge([piece[0] for piece in taken]))
            for _, reserved, dropped in taken:
                self._entries.popleft()
                self._budget.settle(number, reserved, dropped)

    def record_nothing(self) -> None:
        """Write an empty manifest: the caretaker has not told of our last one. Raises
        StoreError."""
        self._budget.settle(self._journal.append(np.zeros(0, ENTRY)))

    def _next_manifest(self, queued: int) -> list[tuple[Entries, int, int]]:
        """As many of the first pieces in the queue as go into one manifest."""
        taken = list(islice(self._entries, min(queued, _ENTRIES_MAX)))
        rows = 0
        for count, (entries, _, _) in enumerate(taken, 1):
            rows += len(entries)
            if rows >= _ENTRIES_MAX:
                return taken[:count]
        return taken
