"""What a tier has added, removed and dropped, until a store knows it.

Objects are deleted first, and then it is said that they are gone: what manifests tell of is never
less than what is there. If nothing can be deleted it is still said, so that what was dropped is not
found again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, compress, islice

import numpy as np

from kvtier.backends.object.budget.budget import Budget
from kvtier.backends.object.housekeeping.tombstones import Object
from kvtier.backends.object.housekeeping.updates import Rows
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, ENTRY, REMOVED, SKEW_US, Entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import Misconfigured, StoreError
from kvtier.backends.object.stores.store import Store
from kvtier.types import BlockKey

_log = logging.getLogger(__name__)

_ENTRIES_MAX = 1 << 16
"""About so many go into one manifest: it must get through before the store's deadline."""

_PAUSE_MAX = 127
"""Looks: ten minutes, as they usually are."""


class Outbox:
    """`added`, `removed` and `delete` are for the tier's thread, the rest for the keeper's.

    `freed` is called with the slots whose objects are deleted, `meanwhile` between deletes: all of
    them may take minutes.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal,
        budget: Budget,
        freed: Callable[[list[int]], None],
        meanwhile: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._journal = journal
        self._budget = budget
        self._freed = freed
        self._meanwhile = meanwhile
        self._clock = clock
        self._last_us = 0
        self._entries: deque[tuple[Entries, int]] = deque()
        """What is to be written down, and how much room is accounted for by it."""
        self._doomed: deque[tuple[int, list[Object]]] = deque()
        """Slots, and their objects, which are to be deleted."""
        self._stubborn: list[tuple[int, list[Object]]] = []
        """Likewise, but the store would not: to be tried again at the next look."""
        self._complained = False
        self._pause = self._wait = 0
        """Looks between two tries for what is stubborn, and how many are left."""

    # -- time ------------------------------------------------------------------------------------

    def now_us(self) -> int:
        """Microseconds since the epoch, each time later than the last."""
        self._last_us = max(self._last_us + 1, int(self._clock() * 1e6))
        return self._last_us

    def now_s(self) -> float:
        """Seconds since the epoch, each time later than all that is written down."""
        return self.now_us() / 1e6

    def heard_of(self, at_us: int) -> int:
        """Something has been written down at this time; when that may have been. What follows is
        later, whatever the clocks of others say, as long as they are not wrong beyond belief."""
        at_us = min(at_us, int(self._clock() * 1e6) + SKEW_US)
        self._last_us = max(self._last_us, at_us)
        return at_us

    # -- what the tier says ----------------------------------------------------------------------

    def added(
        self, keys: Sequence[BlockKey], generations: Sequence[int], sizes: Sequence[int]
    ) -> float:
        """Write down soon that these blocks are there; since when, in seconds of the epoch."""
        now_us = self.now_us()
        entries = manifest.pack_entries(ADDED, keys, generations, sizes, now_us)
        self._entries.append((entries, sum(sizes)))
        return now_us / 1e6

    def removed(
        self,
        keys: Sequence[BlockKey],
        generations: Sequence[int],
        known_s: float | None = None,
    ) -> None:
        """Write down soon that these blocks must not be found again: as they are now, or as they
        were at a time (of the epoch)."""
        at_us = self.now_us() if known_s is None else int(known_s * 1e6) + 2
        entries = manifest.pack_entries(REMOVED, keys, generations, 0, at_us)
        for start in range(0, len(entries), _ENTRIES_MAX):
            self._entries.append((entries[start : start + _ENTRIES_MAX], 0))

    def correct(self, kind: int, rows: Rows) -> None:
        """Write down soon what a listing has shown."""
        times_us = [int(at * 1e6) + 2 for at in rows.times]  # later than what it corrects
        entries = manifest.pack_entries(kind, rows.keys, rows.generations, rows.sizes, times_us)
        self._entries.append((entries, 0))

    def delete(self, slot: int, objects: list[Object]) -> None:
        """Delete these objects soon, and free the slot's room then."""
        self._doomed.append((slot, objects))

    # -- the store -------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        return not (self._entries or self._doomed or self._stubborn)

    @property
    def waiting(self) -> Entries:
        """All that is still to be written down."""
        return np.concatenate(
            [np.zeros(0, ENTRY), *(entries for entries, _ in tuple(self._entries))]
        )

    def write_down(self) -> None:
        """Delete, then say so, and what was added; raises StoreError."""
        waiting = len(self._entries)
        self.delete_doomed()
        self._state(waiting)

    def state(self) -> None:
        """Only say what was said until now; raises StoreError."""
        self._state(len(self._entries))

    def _state(self, waiting: int) -> None:
        while waiting:
            taken = self._portion(waiting)
            waiting -= len(taken)
            self._journal.append(manifest.merge([entries for entries, _ in taken]))
            for _, size in taken:
                self._entries.popleft()
                self._budget.settle(size)

    def _portion(self, waiting: int) -> list[tuple[Entries, int]]:
        """The first of so many pieces that wait: as many as go into one manifest."""
        taken = list(islice(self._entries, min(waiting, _ENTRIES_MAX)))
        rows = 0
        for count, (entries, _) in enumerate(taken, 1):
            rows += len(entries)
            if rows >= _ENTRIES_MAX:
                return taken[:count]
        return taken

    def delete_doomed(self) -> None:
        """What is left, because the store is away, waits for the next time."""
        try:
            while self._doomed:
                self._delete_some()
                self._meanwhile()
        except Misconfigured as error:  # which nothing but a setting ends
            self._complain(error)
            return
        except StoreError as error:
            _log.debug("object tier: %s", error)
        self._complained &= bool(self._stubborn)

    def _complain(self, error: StoreError) -> None:
        if not self._complained:
            _log.warning("objects cannot be deleted: %s", error)
            self._complained = True

    def _delete_some(self) -> None:
        doomed = list(islice(self._doomed, self._store.deletes_at_once))
        namespace = self._journal.namespace.id
        # not sooner: of a million blocks names take hundreds of megabytes
        names = [[block_name(namespace, *one) for one in objects] for _, objects in doomed]
        errors = self._store.delete(list(chain.from_iterable(names)))
        for _ in doomed:
            self._doomed.popleft()
        # one that is protected, say, must not keep all else from being done
        stuck = [not errors.keys().isdisjoint(some) for some in names]
        self._stubborn += compress(doomed, stuck)
        self._freed([slot for (slot, _), stays in zip(doomed, stuck, strict=True) if not stays])
        if errors:
            self._complain(next(iter(errors.values())))

    def try_again(self) -> None:
        """Delete once more what the store would not delete. What is locked may be so for days: each
        time twice as many looks go by before."""
        if not self._stubborn:
            self._pause = self._wait = 0
        elif self._wait:
            self._wait -= 1
        else:
            self._doomed.extend(self._stubborn)
            self._stubborn.clear()
            self._wait = self._pause = min(2 * self._pause + 1, _PAUSE_MAX)
