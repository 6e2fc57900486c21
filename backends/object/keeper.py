"""What an object tier must do in the store, kept off the thread that asks it questions.

The keeper writes down what was added and removed, deletes what was dropped, reads what other
writers did, and from time to time compares all that with what is really there. What it learns it
hands over as `News`, which the tier takes in at its next call. A store that is away costs nothing
but memory for what is still to be written down.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from kvtier.backends.object import manifest
from kvtier.backends.object.audit import Audit, Finding, Unfinished, audit
from kvtier.backends.object.breath import Breath
from kvtier.backends.object.budget import Budget, Standing
from kvtier.backends.object.claims import Claims
from kvtier.backends.object.errors import StoreError
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.limits import Limits
from kvtier.backends.object.manifest import ADDED, REMOVED, SKEW_US, Entries
from kvtier.backends.object.names import description_name
from kvtier.backends.object.news import Known, News, leaving_by, news_among, rows_of
from kvtier.backends.object.spread import Spread, mark
from kvtier.backends.object.store import Store
from kvtier.backends.object.uses import Uses
from kvtier.core.record import HEADER_BYTES
from kvtier.types import BlockKey, Namespace

_log = logging.getLogger(__name__)

_WRITE_S = 0.5
_OPEN_S = 2.0
"""How long opening may wait for a listing; what manifests say is known before."""
_CLOSE_S = 60.0
_CRASHED_S = 3600.0
_DELETES = 1000
_ENTRIES_MAX = 1 << 16
_HASTE_SHARE = 0.9
_NEWS_MAX = 1024
"""Pieces of a few hundred blocks at most: a tier may not be asked for days, beside busy ones."""


class Keeper:
    """The store work of one tier: `news` leads to the tier, the methods lead here."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.namespace = namespace
        self.limits = limits
        self.block_bytes = HEADER_BYTES + namespace.payload_bytes
        self.budget = Budget(limits.capacity, self.block_bytes)
        self.news: deque[News] = deque()
        self._store = store
        self._clock = clock
        self._journal = Journal(store, namespace)
        self._claims = Claims(store, namespace.id, self.budget, lease_s=limits.lease_s)
        self._entries: deque[tuple[Entries, int]] = deque()
        """What is to be written down, and how much room is accounted for by it."""
        self._doomed: deque[tuple[int, list[str]]] = deque()
        """Slots, and the names of their objects, which are to be deleted."""
        self._stubborn: list[tuple[int, list[str]]] = []
        """Likewise, but the store would not: to be tried again at the next look."""
        self._complained = False
        self._last_standing = News()
        self._last_us = 0
        self._hungry = False
        self._hurried = False
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._next_look = self._next_audit = 0.0
        self._purged_before = 0.0
        self._thread: threading.Thread | None = None
        self._known: Known = lambda: iter(())
        self._breath = Breath(self._meanwhile)
        self.uses = Uses(store, namespace, limits.audit_s, self._breath.rest)
        self._listing = False

    # -- what the tier asks for ------------------------------------------------------------

    def now_us(self) -> int:
        """Microseconds since the epoch, each time later than the last."""
        self._last_us = max(self._last_us + 1, int(self._clock() * 1e6))
        return self._last_us

    def now_s(self) -> float:
        """Seconds since the epoch, each time later than all that is written down."""
        return self.now_us() / 1e6

    def added(
        self, keys: Sequence[BlockKey], generations: Sequence[int], sizes: Sequence[int]
    ) -> float:
        """Write down soon that these blocks are there; since when, in seconds of the epoch."""
        now_us = self.now_us()
        entries = manifest.pack_entries(ADDED, keys, generations, sizes, [now_us] * len(keys))
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
        count = len(keys)
        at_us = self.now_us() if known_s is None else int(known_s * 1e6) + 2
        entries = manifest.pack_entries(REMOVED, keys, generations, [0] * count, [at_us] * count)
        self._entries.append((entries, 0))

    def delete(self, slot: int, names: list[str]) -> None:
        """Delete these objects soon; News says when the slot's room is free."""
        self._doomed.append((slot, names))
        self._wake.set()

    def want_room(self) -> None:
        """Other namespaces leave too little room."""
        self._hungry = self._claims.hungry = True

    def hurry(self) -> None:
        """There is no room left: claim more soon."""
        if not self._hurried:
            self._hurried = True
            self._wake.set()

    # -- beginning and end -----------------------------------------------------------------

    def open(self, known: Known) -> None:
        """Learn what is there; raises StoreError. `known` answers the tier's keys and their
        generations, from any thread."""
        self._known = known
        with self._mutex:
            self._store.put(
                description_name(self.namespace.id),
                [memoryview(self.namespace.to_json())],
                if_absent=True,
            )
            try:
                self._audit(stop_at=time.monotonic() + _OPEN_S)
            except Unfinished:  # the rest is listed in the background
                self._look()

    def learn(self) -> None:
        """What manifests say, without a look at the objects; raises StoreError."""
        self._tell(self._journal.everything(), Spread())

    def start(self) -> None:
        """Begin to work in the background."""
        self._breath.alone = False
        self._thread = threading.Thread(target=self._run, name="kvtier-object-keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(min(_WRITE_S, self.limits.refresh_s))
            self._wake.clear()
            if not self._stopping:
                self.work()

    def work(self) -> None:
        """One round of whatever is due. Weather is no news: the store's breaker logs it."""
        with self._mutex:
            self.uses.count()
            try:
                self._write_down()
                now = time.monotonic()
                if now >= self._next_audit and not self._unheard:
                    self._audit()
                elif now >= self._next_look - self._haste_s():
                    self._look()
            except Unfinished:
                return  # `close` waits
            except StoreError as error:
                self._next_look = time.monotonic() + self.limits.refresh_s
                self._next_audit = max(self._next_audit, self._next_look)
                _log.debug("object tier: %s", error)

    @property
    def _unheard(self) -> bool:
        """Whether nobody has listened for long: what others do waits in the store until then."""
        return not self._breath.alone and len(self.news) > _NEWS_MAX

    def _haste_s(self) -> float:
        """How much sooner than usual to look."""
        return self.limits.refresh_s * _HASTE_SHARE if self._hurried else 0.0

    def flush(self) -> None:
        """Write everything down that the tier has said so far; quiet if the store is away."""
        with self._mutex:
            try:
                self._write_down()
            except StoreError as error:
                _log.debug("object tier: %s", error)

    def refresh(self) -> None:
        """Learn everything now, and fast: the caller waits. Quiet if the store is away."""
        with self._mutex:
            alone, self._breath.alone = self._breath.alone, True
            try:
                self._write_down()
                self._audit()
            except StoreError as error:
                _log.debug("object tier: %s", error)
            finally:
                self._breath.alone = alone or self._stopping

    def close(self) -> None:
        self._stopping = self._breath.alone = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():  # in a file system that does not answer
                _log.warning("the object store does not answer: what is to be written down is lost")
                return
        self.flush()
        with self._mutex:
            self.uses.close()
        with self._mutex, contextlib.suppress(StoreError):  # then it is found to be dead
            self._claims.close(clean=not self._entries and not self._doomed and not self._stubborn)
        self._store.close()

    # -- the work ----------------------------------------------------------------------------

    def _write_down(self) -> None:
        """Delete, then say so: what manifests tell of is never less than what is there. If nothing
        can be deleted it is still said, so that what was dropped is not found again."""
        waiting = len(self._entries)
        try:
            self._delete_doomed()
        finally:
            while waiting:
                count = min(waiting, _ENTRIES_MAX)
                waiting -= count
                taken = list(islice(self._entries, count))
                self._journal.append(manifest.merge([entries for entries, _ in taken]))
                for _, size in taken:
                    self._entries.popleft()
                    self.budget.settle(size)

    def _delete_doomed(self) -> None:
        while self._doomed:
            slots = list(islice(self._doomed, _DELETES))
            names = [name for _, names in slots for name in names]
            errors = self._store.delete(names)
            failed = errors.keys()
            for _ in slots:
                self._doomed.popleft()
            # one that is protected, say, must not keep all else from being done
            self._stubborn += [(slot, n) for slot, n in slots if not failed.isdisjoint(n)]
            self.news.append(News(freed=[slot for slot, n in slots if failed.isdisjoint(n)]))
            if failed and not self._complained:
                _log.warning("objects cannot be deleted: %s", next(iter(errors.values())))
                self._complained = True
        self._complained &= bool(self._stubborn)

    def _look(self) -> None:
        """What others have written since the last look, and what we may do beside them."""
        self._next_look = time.monotonic() + self.limits.refresh_s
        self._hurried = False
        self._doomed.extend(self._stubborn)
        self._stubborn.clear()
        standing, dead = self._claims.renew()
        if not self._claims.measured or (standing.dead and dead):
            self._next_audit = 0.0  # nobody knows what is there
        if self._unheard:
            return
        self._tell(self._journal.news())
        self._tell_standing(standing)
        self._journal.join(self._purged_before)
        self.uses.look()

    def _tell(self, entries: Entries, known: Spread[None] | None = None) -> None:
        """Hand entries over; of a whole state only what is not `known` as it is stated."""
        latest_us, now_us = 0, int(self._clock() * 1e6)
        if len(entries):  # what follows is later, whatever the clocks of others say
            latest_us = min(int(entries["time_us"][-1]), now_us + SKEW_US)
            self._last_us = max(self._last_us, latest_us)
        for kind in (REMOVED, ADDED):
            for piece in self._breath.chunks(len(entries)):
                rows = entries[piece]
                rows = rows[rows["kind"] == kind]
                if known is not None and len(rows):
                    rows = rows[news_among(rows, known, min(latest_us, now_us))]
                if len(rows):
                    told = rows_of(rows)
                    self.news.append(News(added=told) if kind == ADDED else News(removed=told))

    def _tell_standing(self, standing: Standing) -> None:
        """In place of the last one if nobody has listened since: it may be a quiet weekend."""
        with contextlib.suppress(IndexError):
            if self.news[-1] is self._last_standing:
                self._last_standing.standing = standing
                return
        self._last_standing = News(standing=standing)
        self.news.append(self._last_standing)

    def _audit(self, stop_at: float | None = None) -> None:
        """Everything that is written down, against everything that is there."""
        self._next_look = time.monotonic() + self.limits.refresh_s
        hidden, known = self.budget.hidden, self._known_soon()
        try:
            self._audit_beside(known, hidden, stop_at)
        finally:
            known.clear(self._breath.rest)

    def _audit_beside(self, known: Spread[None], hidden: int, stop_at: float | None) -> None:
        self._write_down()  # what is known, and perhaps was removed before, is stated now
        begun = self._clock()
        _, dead = self._claims.renew()
        entries = self._journal.everything()
        self.news.append(News(unhidden=hidden))
        self._tell(entries, known)
        finding = self._list(
            Audit(
                namespace=self.namespace.id,
                entries=entries,
                known=known,
                capacity=self.limits.capacity,
                hungry=self._hungry,
                age_max_s=self.limits.age_max_s,
                read_s=0.0 if dead else self.limits.read_s,  # nobody accounts for what they left
                now=begun,
                stop_at=stop_at,
            )
        )
        self._next_audit = time.monotonic() + self.limits.audit_s * random.uniform(0.8, 1.2)
        for _ in self._store.sweep(_CRASHED_S):
            self._breath()
        self._journal.drop_broken()
        self._purged_before = begun - self.limits.read_s
        self._hungry = False
        self._take_in(finding)
        self._write_down()
        self._claims.take_measure(finding.foreign)
        self._claims.bury(dead)
        self._look()

    def _list(self, case: Audit) -> Finding:
        self._listing = True
        try:
            return audit(self._store, case, self._breath)
        finally:
            self._listing = False

    def _meanwhile(self) -> None:
        """While everything is listed, which may take minutes, the rest of the work goes on."""
        if self._stopping:
            raise Unfinished
        if self._listing and time.monotonic() >= self._next_look:
            self._listing = False
            self._write_down()
            self._look()
            self._listing = True

    def _known_soon(self) -> Spread[None]:
        """What the tier knows, but for what it is still to hear of."""
        leaving = leaving_by(tuple(self.news))
        known: Spread[None] = Spread()
        self._breath.begin()
        for key, generation in self._known():
            self._breath()
            found = mark(key, generation)
            if found not in leaving:
                known.part(found)[found] = None
        return known

    def _take_in(self, finding: Finding) -> None:
        """Tell the tier, and write down."""
        for kind, rows in ((ADDED, finding.orphans), (REMOVED, finding.gone)):
            for piece in self._breath.chunks(len(rows)):
                told = rows[piece]
                self.news.append(News(added=told) if kind == ADDED else News(removed=told))
                times_us = [int(at * 1e6) + 2 for at in told.times]  # later than what it corrects
                entries = manifest.pack_entries(
                    kind, told.keys, told.generations, told.sizes, times_us
                )
                self._entries.append((entries, 0))
