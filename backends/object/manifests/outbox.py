"""What a tier has added, removed and dropped, until the store knows it.

Objects are deleted first, and only then recorded as removed: manifests never list less than is
there. If nothing can be deleted, the removal is recorded all the same, so that a dropped block is
not found again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, compress, islice

import numpy as np

from kvtier.backends.object.budget.budget import Budget
from kvtier.backends.object.manifests.block_rows import Rows
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import (
    ADDED,
    ENTRY,
    REMOVED,
    SKEW_US,
    Entries,
    pack_entries,
)
from kvtier.backends.object.manifests.merge import merge
from kvtier.backends.object.object_names import ObjectKey, block_name
from kvtier.backends.object.stores.errors import Misconfigured, StoreError
from kvtier.backends.object.stores.store import Store
from kvtier.types import BlockKey

_log = logging.getLogger(__name__)

_ENTRIES_MAX = 1 << 16
"""About so many go into one manifest, which must be written before the store's deadline."""

_PAUSE_MAX = 127
"""In looks: ten minutes, with the usual `refresh`."""


class Outbox:
    """`added`, `removed` and `delete` are for the tier's thread, the rest for the keeper's.

    `deleted` is called with the slots whose objects are deleted, `meanwhile` between batches of
    deletes, which together may take minutes.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal,
        budget: Budget,
        deleted: Callable[[list[int]], None],
        meanwhile: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._journal = journal
        self._budget = budget
        self._deleted = deleted
        self._meanwhile = meanwhile
        self._clock = clock
        self._last_us = 0
        self._entries: deque[tuple[Entries, int]] = deque()
        """Entries to record, and how many reserved bytes each piece accounts for."""
        self._deletes: deque[tuple[int, list[ObjectKey]]] = deque()
        """Slots, and their objects, which are to be deleted."""
        self._refused: list[tuple[int, list[ObjectKey]]] = []
        """Deletes that the store has refused: see `retry_refused`."""
        self._warned = False
        self._pause = self._looks_left = 0
        """Looks between two attempts at refused deletes, and how many are left."""

    # -- time ------------------------------------------------------------------------------------

    def now_us(self) -> int:
        """Microseconds since the epoch, each time later than the last."""
        self._last_us = max(self._last_us + 1, int(self._clock() * 1e6))
        return self._last_us

    def now_s(self) -> float:
        """Seconds since the epoch, later than all that is recorded."""
        return self.now_us() / 1e6

    def observe_time(self, at_us: int) -> int:
        """An entry of this time has been read; returns when that may have been. Later entries of
        ours get later times, whatever the clocks of others say, unless those are wrong beyond
        belief."""
        at_us = min(at_us, int(self._clock() * 1e6) + SKEW_US)
        self._last_us = max(self._last_us, at_us)
        return at_us

    # -- the tier's side -------------------------------------------------------------------------

    def added(
        self, keys: Sequence[BlockKey], generations: Sequence[int], sizes: Sequence[int]
    ) -> float:
        """Record soon that these blocks are there; since when, in seconds of the epoch."""
        now_us = self.now_us()
        entries = pack_entries(ADDED, keys, generations, sizes, now_us)
        self._entries.append((entries, sum(sizes)))
        return now_us / 1e6

    def removed(
        self,
        keys: Sequence[BlockKey],
        generations: Sequence[int],
        known_s: float | None = None,
    ) -> None:
        """Record soon that these blocks must not be found again: the objects of now, or those that
        were known at a time (of the epoch)."""
        at_us = self.now_us() if known_s is None else int(known_s * 1e6) + 2
        entries = pack_entries(REMOVED, keys, generations, 0, at_us)
        for start in range(0, len(entries), _ENTRIES_MAX):
            self._entries.append((entries[start : start + _ENTRIES_MAX], 0))

    def delete(self, slot: int, objects: list[ObjectKey]) -> None:
        """Delete these objects soon, and report the slot then."""
        self._deletes.append((slot, objects))

    # -- the keeper's side -----------------------------------------------------------------------

    def correct(self, kind: int, rows: Rows) -> None:
        """Record soon what a listing has shown."""
        times_us = [int(at * 1e6) + 2 for at in rows.times]  # later than what it corrects
        entries = pack_entries(kind, rows.keys, rows.generations, rows.sizes, times_us)
        self._entries.append((entries, 0))

    @property
    def empty(self) -> bool:
        return not (self._entries or self._deletes or self._refused)

    @property
    def queued(self) -> Entries:
        """All entries that are not recorded yet."""
        return np.concatenate(
            [np.zeros(0, ENTRY), *(entries for entries, _ in tuple(self._entries))]
        )

    def flush(self) -> None:
        """Delete, then record what is queued now; raises StoreError."""
        queued = len(self._entries)
        self.delete_queued()
        self._record(queued)

    def record(self) -> None:
        """Record what is queued now, and delete nothing; raises StoreError."""
        self._record(len(self._entries))

    def _record(self, queued: int) -> None:
        while queued:
            taken = self._next_manifest(queued)
            queued -= len(taken)
            self._journal.append(merge([entries for entries, _ in taken]))
            for _, size in taken:
                self._entries.popleft()
                self._budget.settle(size)

    def _next_manifest(self, queued: int) -> list[tuple[Entries, int]]:
        """As many of the first pieces in the queue as go into one manifest."""
        taken = list(islice(self._entries, min(queued, _ENTRIES_MAX)))
        rows = 0
        for count, (entries, _) in enumerate(taken, 1):
            rows += len(entries)
            if rows >= _ENTRIES_MAX:
                return taken[:count]
        return taken

    def delete_queued(self) -> None:
        """Delete in batches. If the store fails, the rest waits for the next call."""
        try:
            while self._deletes:
                self._delete_batch()
                self._meanwhile()
        except Misconfigured as error:  # which only a change of settings ends
            self._warn_once(error)
            return
        except StoreError as error:
            _log.debug("object tier: %s", error)
        self._warned &= bool(self._refused)

    def _warn_once(self, error: StoreError) -> None:
        if not self._warned:
            _log.warning("objects cannot be deleted: %s", error)
            self._warned = True

    def _delete_batch(self) -> None:
        batch = list(islice(self._deletes, self._store.deletes_at_once))
        namespace = self._journal.namespace.id
        # not earlier: the names of a million blocks take hundreds of megabytes
        names = [[block_name(namespace, *one) for one in objects] for _, objects in batch]
        errors = self._store.delete(list(chain.from_iterable(names)))
        for _ in batch:
            self._deletes.popleft()
        # an object that is locked, say, must not hold up all others
        refused = [not errors.keys().isdisjoint(some) for some in names]
        self._refused += compress(batch, refused)
        self._deleted([slot for (slot, _), stays in zip(batch, refused, strict=True) if not stays])
        if errors:
            self._warn_once(next(iter(errors.values())))

    def retry_refused(self) -> None:
        """Try refused deletes again at ever longer intervals: a locked object may be so for days.
        Called at each look."""
        if not self._refused:
            self._pause = self._looks_left = 0
        elif self._looks_left:
            self._looks_left -= 1
        else:
            self._deletes.extend(self._refused)
            self._refused.clear()
            self._looks_left = self._pause = min(2 * self._pause + 1, _PAUSE_MAX)
