"""What a keeper does in the store: looks at what others do, and audits."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from kvtier.backends.object.budget import budget
from kvtier.backends.object.budget.budget import Budget, Grant
from kvtier.backends.object.budget.claims import Claims
from kvtier.backends.object.housekeeping import empty_namespaces
from kvtier.backends.object.housekeeping.audit import AuditInput, AuditResult, Unfinished, audit
from kvtier.backends.object.housekeeping.background_errors import BackgroundErrors
from kvtier.backends.object.housekeeping.empty_namespaces import EmptyNamespaces
from kvtier.backends.object.housekeeping.keeper_limits import Limits
from kvtier.backends.object.housekeeping.schedule import Schedule
from kvtier.backends.object.housekeeping.updates import OfferedBlocks, Update, UpdateQueue
from kvtier.backends.object.housekeeping.use_counts import Uses
from kvtier.backends.object.lock_yield import LockYield
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries
from kvtier.backends.object.manifests.outbox import Outbox
from kvtier.backends.object.manifests.reconcile import Reconciliation
from kvtier.backends.object.object_names import description_name
from kvtier.backends.object.stores.errors import StoreError, StoreFull
from kvtier.backends.object.stores.store import Store
from kvtier.backends.object.stores.wrapper import RevocableStore
from kvtier.record.record import HEADER_BYTES
from kvtier.types import Namespace

_log = logging.getLogger(__name__)

_CRASHED_S = 3600.0
_UPDATES_MAX = 1024
"""Updates have a few hundred blocks at most. An idle tier may not ask for days, while others
store."""


class StoreWork:
    """The work of one tier in its store. One thread at a time.

    `updates` leads to the tier, `outbox` and `uses` lead here from it.
    """

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
        self.schedule = Schedule(limits.refresh_s, limits.audit_s, steady)
        self._lock_yield = LockYield(self._during_long_work)
        self._update_queue = UpdateQueue(self._lock_yield)
        self.updates = self._update_queue.updates
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
            self._update_queue.deleted,
            self._between_deletes,
            clock,
        )
        self.uses = Uses(self._store, namespace, limits.audit_s, self._lock_yield.pause, steady)
        self.background_errors = BackgroundErrors(_log)
        self._needs_room = False
        self._stopping = False
        self._purged_before = 0.0
        self._offered: OfferedBlocks = lambda: iter(())
        self._listing = False
        self.catalogued = False
        """Whether the tier has been told of all that is there, since it was opened."""

    def ask_for_room(self) -> None:
        """Other namespaces leave too little room."""
        self._needs_room = self._claims.cap.needs_room = True

    # -- looks -----------------------------------------------------------------------------------

    def _failed(self, error: Exception, took_s: float = 0.0) -> None:
        self.schedule.failed(error, took_s)
        self.background_errors.record(error)

    @property
    def _backlogged(self) -> bool:
        """Whether the tier has not asked for long. What others do is left in the store then."""
        return not self._lock_yield.alone and len(self.updates) > _UPDATES_MAX

    def _look(self) -> None:
        """Record, and see what others have recorded since the last look and what we may use."""
        self.schedule.look_begins()
        self.outbox.retry_refused()
        self._flush_outbox()
        self._look_at_others()

    def _flush_outbox(self) -> None:
        """What a full store does not take waits, and holds up nobody that makes room there."""
        with contextlib.suppress(StoreFull):
            self.outbox.flush()

    def _look_at_others(self) -> None:
        self.schedule.looks_at_others()
        grant, dead = self._claims.renew()
        if grant is not None:
            self._plan_audits(grant, dead)
        if not self._backlogged:
            self._publish(self._journal.read_new())
            if grant is not None:
                self._update_queue.grant(grant)
            self._join()
            self.uses.look()
        self.background_errors.clear()  # the rest of the work, a listing say, may take minutes

    def _plan_audits(self, grant: Grant, dead: list[str]) -> None:
        self.schedule.plan_audits(
            grant,
            unknown=not self._claims.cap.measured or bool(grant.dead and dead),
            lacks_something=self._needs_room or self.budget.uncatalogued > 0,
        )

    def _join(self) -> None:
        if self.schedule.join_due():
            self.schedule.join_begins()
            self._journal.join(self._purged_before)
            self.schedule.joined()

    def _publish(self, entries: Entries, recorded: Reconciliation | None = None) -> None:
        """Hand entries to the tier. If they are a whole state, only the changes."""
        latest_us, now_us = 0, int(self._clock() * 1e6)
        if len(entries):
            latest_us = min(self.outbox.observe_time(int(entries["time_us"][-1])), now_us)
        chosen = None if recorded is None else partial(recorded.changes, latest_us=latest_us)
        self._update_queue.entries(entries, chosen)

    # -- audits ----------------------------------------------------------------------------------

    def _audit(self, stop_at: float | None = None) -> None:
        """Compare everything that is recorded with everything that is there."""
        self.schedule.look_begins()
        found = self._compare(stop_at)
        self._look()
        if not found.empty_namespaces.describes(self.namespace):
            self._describe(if_absent=False)  # it may be there and be cut short
        if stop_at is None:  # nobody waits
            self._remove_empty(found.empty_namespaces)

    def _describe(self, *, if_absent: bool) -> None:
        text = memoryview(self.namespace.to_json())
        self._store.put(description_name(self.namespace.id), [text], if_absent=if_absent)

    def _remove_empty(self, found: EmptyNamespaces) -> None:
        for namespace in found.found():
            if namespace != self.namespace.id:
                empty_namespaces.remove(self._store, namespace, self._claims.store_time())
                self._lock_yield()

    def _compare(self, stop_at: float | None) -> AuditResult:
        self._flush_outbox()
        begun = self._clock()
        grant, dead = self._claims.renew()
        if grant is not None:
            self.schedule.writers = grant.writers
        inputs = AuditInput(
            namespace=self.namespace.id,
            recorded=self._publish_recorded(),
            capacity=self.budget.capacity,
            needs_room=self._needs_room,
            too_old_s=self._claims.store_time_before(self.limits.age_max_s),
            reader_grace_s=self.limits.reader_grace_s,
            writers_died=bool(dead),
            now=begun,
            protected=self.limits.protected,
            stop_at=stop_at,
        )
        self._listing = True
        try:
            result = audit(self._store, inputs, self._lock_yield)
        finally:
            self._listing = False
        self.schedule.audited()
        for _ in self._store.sweep(_CRASHED_S):
            self._lock_yield()
        self._journal.drop_damaged()
        self._purged_before = begun - self.limits.reader_grace_s
        self._needs_room = False
        self._apply(result)
        self.catalogued = True
        self.outbox.flush()
        self._claims.cap.note_foreign(result.foreign)
        self._claims.drop_dead(dead)
        return result

    def _publish_recorded(self) -> Reconciliation:
        """Tell the tier what is recorded and not known to it. Blocks that were uncatalogued are
        among that."""
        recorded = Reconciliation(self._journal.read_all())
        uncatalogued = self.budget.uncatalogued
        removed = [update.removed for update in tuple(self.updates) if update.removed is not None]
        recorded.compare(self._offered(), removed, self._lock_yield)
        recorded.date_unrecorded(self.outbox.queued)
        self.updates.append(Update(recatalogued=uncatalogued))
        self._publish(recorded.entries, recorded)
        return recorded

    def _apply(self, result: AuditResult) -> None:
        """Tell the tier, and record for all others."""
        for kind, rows in ((ADDED, result.orphans), (REMOVED, result.gone)):
            for piece in self._lock_yield.chunks(len(rows)):
                self._update_queue.rows(kind, rows[piece])
                self.outbox.correct(kind, rows[piece])

    # -- amid long work --------------------------------------------------------------------------

    def _between_deletes(self) -> None:
        """Look at others when that is due, and so renew our claim: they must not take us for
        dead."""
        if self._steady() >= self.schedule.next_look and not self._stopping:
            self._look_at_others()

    def _during_long_work(self) -> None:
        """A listing may take minutes, and the rest of the work goes on meanwhile. Amid other long
        work only the claim is renewed: the updates of that work are older than what a look finds,
        and must come first."""
        if self._stopping:
            raise Unfinished
        if self._steady() < self.schedule.next_look:
            return
        self.schedule.look_begins()
        listing, self._listing = self._listing, False
        try:
            (self._look if listing else self._claims.renew_if_due)()
        except StoreError as error:
            self._failed(error)  # the listing itself may well go on
        self._listing = listing
