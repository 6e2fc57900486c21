"""The store work of an object tier, off the thread that asks the tier questions.

The keeper records what was added and removed, deletes what was dropped, reads what other servers
did, and from time to time compares all that with what is really there. What it learns it puts into
a queue of updates, which the tier takes in at its next call. While a store is away, only what is
still to be recorded takes memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from kvtier.backends.object.budget import budget
from kvtier.backends.object.housekeeping.audit import Unfinished
from kvtier.backends.object.housekeeping.keeper_limits import Limits
from kvtier.backends.object.housekeeping.store_work import StoreWork
from kvtier.backends.object.housekeeping.updates import OfferedBlocks
from kvtier.backends.object.stores.errors import StoreError, StoreFull
from kvtier.backends.object.stores.store import Store
from kvtier.types import Namespace

_log = logging.getLogger(__name__)

_WAKE_S = 0.5
_OPEN_S = 2.0
"""How long opening may wait for a listing. What manifests list is known before."""
_CLOSE_S = 3.0
"""How long closing may take: engines that do not end within seconds are killed."""
_CLOSE_SHARES = (0.375, 0.25)
"""The parts of it for what is under way, and for deletes."""
_GIVEN_UP = "closing the object store in haste; a listing will find what was stored last"


class Keeper(StoreWork):
    """The thread, and what others may ask of it."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = budget.clock,
    ) -> None:
        super().__init__(store, namespace, limits, clock=clock, steady=steady)
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def look_soon(self) -> None:
        """There is no room left: claim more soon."""
        if self.schedule.look_soon():
            self._wake.set()

    # -- beginning and end -----------------------------------------------------------------------

    def open(self, offered: OfferedBlocks) -> None:
        """Learn what is there; raises StoreError. `offered` iterates over the tier's blocks."""
        self._offered = offered
        with self._mutex:
            with contextlib.suppress(StoreFull):  # what is there can be served all the same
                self._describe(if_absent=True)
            try:
                self._audit(stop_at=time.monotonic() + _OPEN_S)
            except (Unfinished, StoreFull):  # the rest is listed, or recorded, later
                self._look()

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
                self.run_once()

    def flush(self) -> None:
        """Record everything that the tier has reported so far; silent if the store is away."""
        with self._mutex:
            try:
                self.outbox.flush()
            except (StoreError, Unfinished) as error:
                _log.debug("object tier: %s", error)

    def refresh(self) -> None:
        """Audit now, without pauses, because the caller waits; silent if the store is away."""
        with self._mutex:
            alone, self._lock_yield.alone = self._lock_yield.alone, True
            try:
                self._audit()
            except (StoreError, Unfinished) as error:
                _log.debug("object tier: %s", error)
            finally:
                self._lock_yield.alone = alone or self._stopping

    def close(self) -> None:
        """Within a few seconds, whatever the store does. What matters most comes first."""
        self._stopping = self._lock_yield.alone = True
        self._store.revoke()
        self._wake.set()
        end = time.monotonic() + _CLOSE_S
        wait_s, deletes_s = (share * _CLOSE_S for share in _CLOSE_SHARES)
        if not self._mutex.acquire(timeout=wait_s):
            _log.warning("%s: it does not answer", _GIVEN_UP)
            self._store.close()
            return
        try:
            self._store.revoke(time.monotonic() + deletes_s)
            self.outbox.delete_queued()
            self._store.revoke(end)
            self._leave()
        except StoreError as error:
            _log.warning("%s: %s", _GIVEN_UP, error)
        finally:
            self._store.revoke()
            self._mutex.release()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    def _leave(self) -> None:
        """Record what is left and give up the claim; raises StoreError."""
        try:
            self.outbox.record()
        finally:
            self._claims.close(clean=self.outbox.empty)
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
                look_at = self.schedule.look_at()
                self.outbox.delete_queued()
                audits = self.schedule.audit_due() and not self._backlogged
                looks = self._steady() >= self.schedule.look_at()
                if audits:
                    self._audit()
                elif looks:
                    self._look()
                elif self.budget.mostly_unrecorded or self._steady() >= look_at:
                    self._flush_outbox()  # looks between deletes record nothing
                if audits or looks:
                    self.background_errors.clear()
            except Unfinished:
                return  # `close` waits
            except Exception as error:  # noqa: BLE001 - without this thread nothing is stored
                self._failed(error, self._steady() - began)
