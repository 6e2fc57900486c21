"""What an object tier must do in the store, kept off the thread that asks it questions.

The keeper writes down what was added and removed, deletes what was dropped, reads what other
writers did, and from time to time compares all that with what is really there. What it learns it
hands over as `News`, which the tier takes in at its next call. A store that is away costs nothing
but memory for what is still to be written down.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial

from kvtier.backends.object.budget import budget
from kvtier.backends.object.budget.budget import Budget, Standing
from kvtier.backends.object.budget.claims import Claims
from kvtier.backends.object.housekeeping import empty_namespaces
from kvtier.backends.object.housekeeping.background_errors import BackgroundErrors
from kvtier.backends.object.housekeeping.empty_namespaces import EmptyNamespaces
from kvtier.backends.object.housekeeping.keeper_limits import Limits
from kvtier.backends.object.housekeeping.lock_yield import LockYield
from kvtier.backends.object.housekeeping.updates import Known, UpdateQueue, Updates
from kvtier.backends.object.housekeeping.use_counts import Uses
from kvtier.backends.object.manifests.audit import Audit, Finding, Unfinished, audit
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries
from kvtier.backends.object.manifests.outbox import Outbox
from kvtier.backends.object.manifests.reconcile import Reconciliation
from kvtier.backends.object.object_names import description_name
from kvtier.backends.object.stores.errors import EndlessListing, StoreError, StoreFull
from kvtier.backends.object.stores.revocable import RevocableStore
from kvtier.backends.object.stores.store import Store
from kvtier.core.records.record import HEADER_BYTES
from kvtier.types import Namespace

_log = logging.getLogger(__name__)

_WAKE_S = 0.5
_OPEN_S = 2.0
"""How long opening may wait for a listing; what manifests say is known before."""
_CLOSE_S = 3.0
"""How long closing may take: engines are killed that do not end within seconds."""
_CLOSE_SHARES = (0.375, 0.25)
"""Of that, for what is under way to end, and for what is to be deleted."""
_GIVEN_UP = "closing the object store in haste; a listing will find what was stored last"
_CRASHED_S = 3600.0
_HASTE_SHARE = 0.9
_NEWS_MAX = 1024
"""Pieces of a few hundred blocks at most: a tier may not be asked for days, beside busy ones."""


class Keeper:
    """The store work of one tier: `news` leads to the tier, `outbox` and the methods lead here."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = budget.clock,
    ) -> None:
        self.namespace = namespace
        self.limits = limits
        self.block_bytes = HEADER_BYTES + namespace.payload_bytes
        self.budget = Budget(limits.capacity, self.block_bytes, steady)
        self._lock_yield = LockYield(self._meanwhile)
        self._update_queue = UpdateQueue(self._lock_yield)
        self.news = self._update_queue.news
        self._store = RevocableStore(store)
        self._clock = clock
        self._steady = steady
        self._journal = Journal(self._store, namespace)
        self._claims = Claims(
            self._store, namespace.id, self.budget, lease_s=limits.lease_s, clock=steady
        )
        self.outbox = Outbox(
            self._store,
            self._journal,
            self.budget,
            self._update_queue.freed,
            self._amid_deletes,
            clock,
        )
        self._writers = 1
        """How many share the namespace, as far as we know."""
        self._hungry = False
        self._hurried = False
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._next_look = self._next_audit = self._next_join = 0.0
        self._audit_at = math.inf
        """When to list everything because nobody knows what is there."""
        self._purged_before = 0.0
        self._thread: threading.Thread | None = None
        self._known: Known = lambda: iter(())
        self.uses = Uses(self._store, namespace, limits.audit_s, self._lock_yield.rest, steady)
        self._listing = False
        self.audited = False  # since it was opened: all that is there has been told
        self.background_errors = BackgroundErrors(_log)

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
            with contextlib.suppress(StoreFull):  # what is there can be served even so
                self._describe(if_absent=True)
            try:
                self._audit(stop_at=time.monotonic() + _OPEN_S)
            except (Unfinished, StoreFull):  # the rest is listed, or written down, later on
                self._look()

    def _describe(self, *, if_absent: bool) -> None:
        text = memoryview(self.namespace.to_json())
        self._store.put(description_name(self.namespace.id), [text], if_absent=if_absent)

    def start(self) -> None:
        """Begin to work in the background."""
        self._lock_yield.alone = False
        self._thread = threading.Thread(target=self._run, name="kvtier-object-keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(min(_WAKE_S, self.limits.refresh_s))
            self._wake.clear()
            if not self._stopping:
                self.work()

    def work(self) -> None:
        """One round of whatever is due. Weather is no news: the store's breaker logs it."""
        with self._mutex:
            if self._stopping:
                return
            self.uses.count()
            began = self._steady()
            try:
                due = self._next_look - self._haste_s()
                self.outbox.delete_doomed()
                now = self._steady()
                audits = now >= min(self._next_audit, self._audit_at) and not self._unheard
                looks = now >= self._next_look - self._haste_s()
                if audits:
                    self._audit()
                elif looks:
                    self._look()
                elif self.budget.pressed or now >= due:  # amid deletes others were only listened to
                    self._write_down()
                if audits or looks:
                    self.background_errors.over()
            except Unfinished:
                return  # `close` waits
            except Exception as error:  # noqa: BLE001 - without this thread nothing is stored
                self._weather(error, self._steady() - began)

    def _weather(self, error: Exception, took_s: float = 0.0) -> None:
        """Try again, but not before the next look, nor all servers at once when it is over; and
        what was listed for minutes in vain only after as many more: each page is paid for."""
        now = self._steady()
        self._next_look = now + self.limits.refresh_s
        list_at = max(self._next_look, now + min(took_s, self.limits.audit_s))
        if self._next_audit <= now:
            self._next_audit = list_at + self._turn_s(self._writers)
        if self._audit_at <= now:
            self._audit_at = list_at + self._turn_s(self._writers)
        if isinstance(error, EndlessListing | StoreFull):  # which no weather ends, after a listing
            self._next_audit = self._audit_at = now + self.limits.audit_s
        self.background_errors.survived(error)

    def _turn_s(self, writers: int) -> float:
        """How long to leave it to others who share the namespace, if there are any."""
        return random.uniform(0.0, (writers - 1) * self.limits.refresh_s)

    @property
    def _unheard(self) -> bool:
        """Whether nobody has listened for long: what others do waits in the store until then."""
        return not self._lock_yield.alone and len(self.news) > _NEWS_MAX

    def _haste_s(self) -> float:
        """How much sooner than usual to look."""
        return self.limits.refresh_s * _HASTE_SHARE if self._hurried else 0.0

    def flush(self) -> None:
        """Write everything down that the tier has said so far; quiet if the store is away."""
        with self._mutex:
            try:
                self.outbox.write_down()
            except (StoreError, Unfinished) as error:
                _log.debug("object tier: %s", error)

    def refresh(self) -> None:
        """Learn everything now, and fast: the caller waits. Quiet if the store is away."""
        with self._mutex:
            alone, self._lock_yield.alone = self._lock_yield.alone, True
            try:
                self._audit()
            except (StoreError, Unfinished) as error:
                _log.debug("object tier: %s", error)
            finally:
                self._lock_yield.alone = alone or self._stopping

    def close(self) -> None:
        """Within a few seconds, whatever the store does; what matters most comes first."""
        self._stopping = self._lock_yield.alone = True
        self._store.pull()
        self._wake.set()
        end = time.monotonic() + _CLOSE_S
        patience, deletes = (share * _CLOSE_S for share in _CLOSE_SHARES)
        if not self._mutex.acquire(timeout=patience):
            _log.warning("%s: it does not answer", _GIVEN_UP)
            self._store.close()
            return
        try:
            self._store.pull(time.monotonic() + deletes)
            self.outbox.delete_doomed()
            self._store.pull(end)
            self._end()
        except StoreError as error:
            _log.warning("%s: %s", _GIVEN_UP, error)
        finally:
            self._store.pull()
            self._mutex.release()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def _end(self) -> None:
        try:
            self.outbox.state()
        finally:
            self._claims.close(clean=self.outbox.empty)
        self.uses.close()

    # -- the work ----------------------------------------------------------------------------

    def _look(self) -> None:
        """What others have written since the last look, and what we may do beside them."""
        self._next_look = self._steady() + self.limits.refresh_s
        self.outbox.try_again()
        self._write_down()
        self._see_others()

    def _write_down(self) -> None:
        """What a full store does not take waits, and keeps nobody from making room there."""
        with contextlib.suppress(StoreFull):
            self.outbox.write_down()

    def _see_others(self) -> None:
        self._next_look = self._steady() + self.limits.refresh_s
        self._hurried = False
        standing, dead = self._claims.renew()
        if standing is not None:
            self._plan_audits(standing, dead)
        if not self._unheard:
            self._tell(self._journal.news())
            if standing is not None:
                self._update_queue.standing(standing)
            self._join()
            self.uses.look()
        # What else there is to do, a listing or deletes, may take minutes.
        self.background_errors.over()

    def _plan_audits(self, standing: Standing, dead: list[str]) -> None:
        """One of all who share a namespace lists everything each `audit`: what it finds it writes
        down for all. Only who knows less than the others must look itself."""
        before, self._writers = self._writers, standing.writers
        now = self._steady()
        if self._claims.measured and not (standing.dead and dead):
            self._audit_at = math.inf  # perhaps somebody else has done it meanwhile
        elif self._audit_at == math.inf:  # and not all of them at once
            self._audit_at = now + self._turn_s(max(before, self._writers))
        turns = 1 if self._hungry or self.budget.hidden > 0 else self._writers
        self._next_audit = min(self._next_audit, now + 1.2 * turns * self.limits.audit_s)

    def _join(self) -> None:
        """About one of all who share the namespace in the time of a look: what many join at once is
        there as often afterwards, and is joined again. And not at every look if the store will not
        have it: that may be gigabytes."""
        if self._steady() >= self._next_join and random.random() * self._writers < 1:
            self._next_join = self._steady() + self.limits.audit_s
            self._journal.join(self._purged_before)
            self._next_join = 0.0

    def _tell(self, entries: Entries, stated: Reconciliation | None = None) -> None:
        """Hand entries over; of a whole state only what is not known as it is stated."""
        latest_us, now_us = 0, int(self._clock() * 1e6)
        if len(entries):
            latest_us = min(self.outbox.heard_of(int(entries["time_us"][-1])), now_us)
        chosen = None if stated is None else partial(stated.news, latest_us=latest_us)
        self._update_queue.entries(entries, chosen)

    def _audit(self, stop_at: float | None = None) -> None:
        """Everything that is written down, against everything that is there."""
        self._next_look = self._steady() + self.limits.refresh_s
        found = self._compare(stop_at)
        self._look()
        if not found.bare.describes(self.namespace):
            self._describe(if_absent=False)  # or it is there, and cut short
        if stop_at is None:  # nobody waits for it
            self._clear_away(found.bare)

    def _clear_away(self, found: EmptyNamespaces) -> None:
        for namespace in found.found():
            if namespace != self.namespace.id:
                empty_namespaces.remove(self._store, namespace, self._claims.store_now())
                self._lock_yield()

    def _compare(self, stop_at: float | None) -> Finding:
        self._write_down()
        begun = self._clock()
        standing, dead = self._claims.renew()
        if standing is not None:
            self._writers = standing.writers
        stated = self._tell_stated()
        finding = self._list(
            Audit(
                namespace=self.namespace.id,
                stated=stated,
                capacity=self.budget.capacity,
                hungry=self._hungry,
                too_old_s=self._claims.long_ago(self.limits.age_max_s),
                read_s=self.limits.read_s,
                dead=bool(dead),
                now=begun,
                spared=self.limits.spared,
                stop_at=stop_at,
            )
        )
        turn_s = self.limits.audit_s * self._writers
        self._next_audit = self._steady() + turn_s * random.uniform(0.8, 1.2)
        self._audit_at = math.inf
        for _ in self._store.sweep(_CRASHED_S):
            self._lock_yield()
        self._journal.drop_broken()
        self._purged_before = begun - self.limits.read_s
        self._hungry = False
        self._take_in(finding)
        self.audited = True
        self.outbox.write_down()
        self._claims.take_measure(finding.foreign)
        self._claims.bury(dead)
        return finding

    def _tell_stated(self) -> Reconciliation:
        """Tell what is written down and not known; what was hidden is found again by it."""
        stated = Reconciliation(self._journal.everything())
        hidden = self.budget.hidden
        stated.compare(self._known(), tuple(self.news), self._lock_yield)
        stated.expect(self.outbox.waiting)
        self.news.append(Updates(unhidden=hidden))
        self._tell(stated.entries, stated)
        return stated

    def _list(self, case: Audit) -> Finding:
        self._listing = True
        try:
            return audit(self._store, case, self._lock_yield)
        finally:
            self._listing = False

    def _amid_deletes(self) -> None:
        """Renew our claim, and look, when that is due: others must not take us for dead."""
        if self._steady() >= self._next_look and not self._stopping:
            self._see_others()

    def _meanwhile(self) -> None:
        """While everything is listed, which may take minutes, the rest of the work goes on. Amid
        other long work we only say that we live: what is told by it is older than what is new."""
        if self._stopping:
            raise Unfinished
        if self._steady() < self._next_look:
            return
        self._next_look = self._steady() + self.limits.refresh_s
        listing, self._listing = self._listing, False
        try:
            (self._look if listing else self._claims.keep)()
        except StoreError as error:
            self._weather(error)  # the listing itself may well go on
        self._listing = listing

    def _take_in(self, finding: Finding) -> None:
        """Tell the tier, and write down."""
        for kind, rows in ((ADDED, finding.orphans), (REMOVED, finding.gone)):
            for piece in self._lock_yield.chunks(len(rows)):
                self._update_queue.rows(kind, rows[piece])
                self.outbox.correct(kind, rows[piece])
