"""The store work of an object tier, off the thread that asks the tier questions.

The keeper records what was added and removed, reads what other servers did, says that this server
lives, and is the caretaker's host if this server is the caretaker. What it learns it puts into a
queue of updates, which the tier takes in at its next call. While a store is away, only what is
still to be recorded takes memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from kvtier.backends.object import writer_ids
from kvtier.backends.object.audit import Audit, Unfinished
from kvtier.backends.object.block_index import BlockIndex
from kvtier.backends.object.budget import Budget, clock
from kvtier.backends.object.caretaker import Caretaker, Limits
from kvtier.backends.object.gil_yield import CHUNK, GilYield
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.lease import CaretakerReport, Lease, LeaseLost, ServerPresence
from kvtier.backends.object.manifests import (
    ADDED,
    REMOVED,
    Entries,
    joined,
    merge,
    object_prints,
    objects_of,
)
from kvtier.backends.object.object_names import ServerName, description_name
from kvtier.backends.object.queues import OfferedBlocks, Outbox, Update, enqueue
from kvtier.backends.object.stores.errors import EndlessListing, StoreError, StoreFull
from kvtier.backends.object.stores.store import Store
from kvtier.backends.object.stores.wrapper import ReadOnlyStore, RevocableStore
from kvtier.backends.object.use_counts import Uses
from kvtier.record.record import HEADER_BYTES
from kvtier.types import BlockKey, Namespace

_log = logging.getLogger(__name__)

_WAKE_S = 0.5
_OPEN_S = 2.0
"""How long opening may wait for a listing. What manifests list is known before."""
_CLOSE_S = 3.0
"""How long closing may take: engines that do not end within seconds are killed."""
_CLOSE_WAIT_SHARE = 0.375
"""The part of it for what is under way."""
_SOON_SHARE = 0.9
_UPDATES_MAX = 1024
"""Updates have a few hundred blocks at most. An idle tier may not ask for days, while others
store: what they do is left in the store then."""
_ELECTION_POLL_S = 0.1
_LATELY_US = 600_000_000
_USES_EVERY_S = 60.0
_UNSEEN_LOOKS = 4
"""After so many looks without a word of our last manifest the caretaker is reminded of it."""


class Keeper:
    """The thread, and what others may ask of it. `updates` lead to the tier, `outbox` and `uses`
    lead here from it."""

    only_reads = False

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = clock,
    ) -> None:
        self.namespace = namespace
        self.limits = limits
        self.block_bytes = HEADER_BYTES + namespace.payload_bytes
        self.budget = Budget(limits.capacity, self.block_bytes, steady)
        self.updates: deque[Update] = deque()
        self.catalogued = False
        """Whether the tier has been told of all that is recorded, since it was opened."""
        self.unwell = False
        """Whether nothing has succeeded since the last error."""
        self.caretaker: Caretaker | None = None
        self.spared: Callable[[], Sequence[BlockKey]] = lambda: ()
        """Blocks that are being read here."""
        self._store = RevocableStore(ReadOnlyStore(store) if self.only_reads else store)
        self._clock = clock
        self._steady = steady
        self._yield = GilYield(self._during_long_work)
        self._journal = Journal(self._store, namespace.id)
        self.outbox = Outbox(self._journal, self.budget, clock)
        server = writer_ids.new_writer_id()
        self._name = ServerName(
            namespace.id, server, self._journal.writer, limits.capacity, self.block_bytes
        )
        self._presence = ServerPresence(self._store, self._name, limits.lease_s, steady)
        self._lease = Lease(self._store, server, limits.lease_s, steady)
        self.uses = Uses(
            self._store,
            namespace.id,
            self._journal.writer,
            math.inf if self.only_reads else min(_USES_EVERY_S, limits.audit_s),
            self._yield.pause,
            steady,
        )
        self._offered: OfferedBlocks = lambda: iter(())
        self._next_look = self._next_audit = 0.0
        self._no_audit_before = 0.0
        """After one that failed."""
        self._next_resync = 0.0
        self._heard_at = 0.0
        """Before the manifests were read last."""
        self._soon = False
        self._reached = False
        """Whether the store has answered: if not, there is nothing to leave."""
        self._unseen_looks = 0
        self._listing = False
        self._stopping = False
        self._logged: set[type[Exception]] = set()
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def look_soon(self) -> None:
        """There is no room left: look for more soon."""
        if not self._soon and not self.only_reads:
            self._soon = True
            self._wake.set()

    # -- beginning and end -----------------------------------------------------------------------

    def open(self, offered: OfferedBlocks) -> None:
        """Learn what is there; raises StoreError. `offered` iterates over the tier's blocks."""
        self._offered = offered
        with self._mutex:
            with contextlib.suppress(StoreFull):  # what is there can be served all the same
                self._describe(if_absent=True)
            self._reached = True
            self._resync(self._journal.read_all)
            with contextlib.suppress(StoreFull):
                self._look()
                self._measure()

    def await_election(self) -> None:
        """Wait until it is decided who keeps the budget: two seconds in a store without conditional
        puts, if nobody does yet. Until then nothing can be stored. Raises StoreError."""
        with self._mutex, contextlib.suppress(StoreFull):
            if self._lease.decided_at < math.inf:
                self._await_election()
                self._measure()

    def _measure(self) -> None:
        if self.caretaker is not None:
            with contextlib.suppress(Unfinished, LeaseLost):  # the rest is listed later
                self._audit(stop_at=time.monotonic() + _OPEN_S)

    def _await_election(self) -> None:
        while self._lease.decided_at < math.inf and not self._stopping:
            time.sleep(_ELECTION_POLL_S)
            if self._steady() >= self._lease.decided_at:
                self._look()

    def start(self) -> None:
        """Begin to work in the background. Raises RuntimeError if the system gives no thread."""
        self._yield.alone = False
        thread = threading.Thread(target=self._run, name="kvtier-object-keeper", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(min(_WAKE_S, self.limits.refresh_s))
            self._wake.clear()
            if not self._stopping:
                self.run_once()

    def flush(self) -> None:
        """Record everything that the tier has reported so far; silent if the store is away."""
        with self._mutex:
            try:
                self.outbox.record()
            except StoreError as error:
                _log.debug("object tier: %s", error)

    def refresh(self) -> None:
        """Learn all that there is to know, without pauses, because the caller waits, also for the
        election of a caretaker; silent if the store is away."""
        with self._mutex:
            alone, self._yield.alone = self._yield.alone, True
            try:
                self._look()
                self._reached = True
                self._await_election()
                if self.caretaker is not None:
                    self._audit()
                self._resync(self._listed)
            except (StoreError, Unfinished) as error:
                _log.debug("object tier: %s", error)
            finally:
                self._yield.alone = alone or self._stopping

    def close(self) -> None:
        """Within a few seconds, whatever the store does. What matters most comes first."""
        self._stopping = self._yield.alone = True
        self._store.revoke()
        self._wake.set()
        end = time.monotonic() + _CLOSE_S
        if not self._mutex.acquire(timeout=_CLOSE_WAIT_SHARE * _CLOSE_S):
            _log.warning("closing the object store in haste: it does not answer")
            self._store.close()
            return
        try:
            self._store.revoke(end)
            if self._reached:
                self._leave()
        except StoreError as error:
            _log.warning(
                "closing the object store in haste; a listing will find what was stored last: %s",
                error,
            )
        finally:
            self._mutex.release()
            self._store.close()

    def _leave(self) -> None:
        writer_ids.mark_ended(self._name.server)
        self.outbox.record()
        self._presence.close()
        self._lease.close()
        self._describe(if_absent=False)  # its time says when somebody was here last
        self.uses.close()

    # -- one round -------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Do whatever is due. Errors of the store are no news: its circuit breaker logs them."""
        with self._mutex:
            if self._stopping:
                return
            self.uses.count()
            began = self._steady()
            try:
                self._do_what_is_due()
            except Unfinished:
                return  # `close` waits
            except Exception as error:  # noqa: BLE001 - without this thread nothing is recorded
                self._failed(error, self._steady() - began)

    def _do_what_is_due(self) -> None:
        now = self._steady()
        look_at = self._next_look - (self.limits.refresh_s * _SOON_SHARE if self._soon else 0.0)
        if now >= look_at:
            self._look()
            self._reached = True
            self.unwell = False  # the rest of the work, a listing say, may take minutes
        elif self.budget.mostly_unrecorded:
            with contextlib.suppress(StoreFull):
                self.outbox.record()
        if self.caretaker is not None and self._steady() >= self._next_audit:
            self._audit()
        lacks = self.only_reads or not self.catalogued
        if lacks and self._steady() >= self._next_resync and not self._backlogged:
            self._resync(self._journal.read_all)

    def _failed(self, error: Exception, took_s: float = 0.0) -> None:
        """Log every kind of unexpected error once, with its trace, and once that a listing has no
        end. Try again at the next look; after a listing that failed after minutes wait as many
        minutes: every page of a listing is paid for."""
        self.unwell = True
        now = self._steady()
        hopeless = isinstance(error, EndlessListing | StoreFull)
        wait_s = self.limits.audit_s if hopeless else min(took_s, self.limits.audit_s)
        looked_s = max(self.limits.refresh_s, min(took_s, self.limits.audit_s))
        self._next_look = max(self._next_look, now + looked_s)
        if self._next_audit <= now:
            self._next_audit = self._no_audit_before = max(self._next_look, now + wait_s)
        expected = isinstance(error, StoreError) and not isinstance(error, EndlessListing)
        if expected or type(error) in self._logged:
            _log.debug("object tier: %s", error)
            return
        self._logged.add(type(error))
        if isinstance(error, EndlessListing):
            _log.warning("the object store is not listed to its end: %s", error)
        else:
            _log.error("object tier: what it does in the background failed", exc_info=error)

    @property
    def _backlogged(self) -> bool:
        """Whether the tier has not asked for long."""
        return not self._yield.alone and len(self.updates) > _UPDATES_MAX

    # -- looks -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Record, and see what others have recorded since the last look and what we may store."""
        self._next_look = self._steady() + self.limits.refresh_s
        lacked_room, self._soon = self._soon, False
        with contextlib.suppress(StoreFull):  # what a full store does not take waits
            self.outbox.record()  # first: who renews has recorded everything
            self._presence.renew(lacks_room=lacked_room, is_caretaker=self._lease.held)
        looked_at = self._steady()
        report = self._lease.look()
        acquired = report is None and self._lease.acquire()
        self._next_look = min(self._next_look, self._lease.decided_at)
        if acquired or (self._lease.held and self.caretaker is None):
            try:
                self._begin_term()
            except EndlessListing:
                self._next_look = self._steady() + self.limits.audit_s
                raise
        if self._lease.held and self.caretaker is not None:
            report = self._round(self.caretaker, looked_at)
        else:
            self.caretaker = None
        if not self._backlogged:
            self._read_news(relayed=report is not None)
            self.uses.look()
        elif self.caretaker is not None and self.caretaker.news:
            self.caretaker.news.clear()
            self.catalogued, self._next_resync = False, 0.0  # all is read again when it asks
        if report is not None:
            self._take_share(report, looked_at)

    def _round(self, caretaker: Caretaker, looked_at: float) -> CaretakerReport | None:
        try:
            report = caretaker.round(self.budget.unseen)
            if self.budget.alone and not caretaker.alone:  # we have no more than others now
                self._take_share(report, looked_at)
                report = caretaker.round(self.budget.unseen)
            return report
        except LeaseLost:  # the store is slow, or we were asleep: another takes over, or we again
            self.caretaker = None
            return None

    def _read_news(self, *, relayed: bool) -> None:
        now = self._steady()
        if now - self._heard_at > self.limits.remembered_s / 2:  # we were asleep, or cut off
            self.catalogued, self._next_resync = False, 0.0
        if self.caretaker is None:
            news = self._journal.read_new(relayed=relayed)
        else:
            news = merge(self.caretaker.news)
            self.caretaker.news.clear()
        self._heard_at = now
        self._publish(news)

    def _begin_term(self) -> None:
        caretaker = Caretaker(
            self._store,
            self._lease,
            self._name,
            self.limits,
            clock=self._clock,
            gil_yield=self._yield,
            spared=lambda: self.spared(),
        )
        self._publish(self._journal.read_new())  # from now on the caretaker reads it for us
        self.caretaker = caretaker
        now = self._steady()
        self._next_audit = now + self.limits.audit_s * random.uniform(0.5, 1.0)

    def _take_share(self, report: CaretakerReport, looked_at: float) -> None:
        self.budget.capacity = report.capacity
        caretaker = self.caretaker
        if caretaker is not None and caretaker.needs_audit:
            soon = max(self._steady(), self._no_audit_before)
            self._next_audit = min(self._next_audit, soon)
        seen = report.seen.get(self._name.writer)
        if seen is None or not report.measured:
            self.budget.grant(0, seen=-1 if seen is None else seen, until=0.0)
            return
        until = min(self._presence.until, looked_at + report.share_s)
        if caretaker is not None:
            until = self._lease.until
        if caretaker is not None and caretaker.alone:
            self.budget.grant(caretaker.own_limit, seen=seen, until=until, alone=True)
        else:
            self.budget.grant(report.share, seen=seen, until=until)
        self._unseen_looks = self._unseen_looks + 1 if self.budget.waits_to_be_seen else 0
        if self._unseen_looks >= _UNSEEN_LOOKS:
            self._unseen_looks = 0
            self.outbox.record_nothing()

    def _publish(self, entries: Entries) -> None:
        if len(entries):
            self.outbox.observe_time(int(entries["time_us"][-1]))
        enqueue(self.updates, entries, self._yield)

    def _resync(self, read: Callable[[], Entries]) -> None:
        """Tell the tier what is recorded and not known to it, and what it offers that is gone."""
        now = self._steady()
        self._next_resync = now + self.limits.audit_s
        began_us = self.outbox.now_us()  # what is stored from now on may not be recorded yet
        with contextlib.suppress(StoreFull):
            self.outbox.record()
        state = read()
        self._heard_at = now
        offered = self._offered_objects()
        offered_prints = object_prints(offered)
        prints = object_prints(state)
        added = state["kind"] == ADDED
        # what is new always counts: the tier may offer another object of the same block, or may
        # have offered it only when it was asked, or has yet to take in that it was there
        lately = state["time_us"] + _LATELY_US > int(self._clock() * 1e6)
        changed = (np.isin(prints, offered_prints) != added) | lately
        if not self.catalogued:
            changed |= ~added  # whose names must not be used again
        self._publish(state[changed])
        unrecorded = offered[~np.isin(offered_prints, prints)]
        unrecorded["kind"], unrecorded["time_us"] = REMOVED, began_us
        self._publish(unrecorded)
        self.catalogued = True

    def _offered_objects(self) -> Entries:
        offered, pieces = iter(self._offered()), []
        self._yield.begin()
        while some := list(islice(offered, CHUNK)):
            pieces.append(objects_of(some))
            self._yield()
        return joined(pieces)

    # -- audits ----------------------------------------------------------------------------------

    def _audit(self, stop_at: float | None = None) -> None:
        assert self.caretaker is not None
        self._listing = True
        try:
            self.caretaker.audit(stop_at)
        finally:
            self._listing = False
        self._next_audit = self._steady() + self.limits.audit_s * random.uniform(0.8, 1.2)
        self._describe(if_absent=False)  # it may be there and be cut short
        self._look()

    def _listed(self) -> Entries:
        """What a listing shows of our namespace, whatever is recorded; nothing is changed there."""
        index = BlockIndex(self._journal.read_all())
        if not self.only_reads:
            found = Audit(
                self._store,
                lambda _: index,
                now_s=self.outbox.now_us() / 1e6,
                gil_yield=self._yield,
            )
            found.run([self.namespace.id], prefix=f"{self.namespace.id}/blocks/")
            for entries in found.findings[self.namespace.id].corrections:
                index.apply(entries)
        return index.entries

    def _describe(self, *, if_absent: bool) -> None:
        text = memoryview(self.namespace.to_json())
        self._store.put(description_name(self.namespace.id), [text], if_absent=if_absent)

    def _during_long_work(self) -> None:
        """A listing may take minutes, and the rest of the work goes on meanwhile."""
        if self._stopping:
            raise Unfinished
        if not self._listing or self._steady() < self._next_look:
            return
        self._listing = False
        try:
            self._look()
        except StoreError as error:
            self._failed(error)  # the listing itself may well go on
        self._listing = True


class ReadOnlyKeeper(Keeper):
    """The keeper of a tier that is only read: it learns what others write, and changes nothing.

    It needs no right to write, and whatever the budget says is left to servers that write.
    """

    only_reads = True

    def _look(self) -> None:
        self._next_look = self._steady() + self.limits.refresh_s
        self.outbox.record()
        if not self._backlogged:
            relayed = self._lease.look() is not None
            self._read_news(relayed=relayed)

    def _leave(self) -> None:
        writer_ids.mark_ended(self._name.server)
