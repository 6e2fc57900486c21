"""How to ask a store that may be unwell: retries within the deadline, and a circuit breaker."""

from __future__ import annotations

import contextlib
import enum
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.store import LISTED_MAX, ObjectInfo, Store, bounded
from kvtier.backends.object.stores.wrapper import WrappedStore

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_REFUSALS = (errors.StoreFull, errors.ObjectTooLarge)
"""The store is well and takes no blocks: somebody must change something."""
_LOG_AGAIN_S = 3600.0


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often to try a call and how long to wait between attempts; after how many failures in a
    row to leave the store alone, and for how long before each trial."""

    attempts: int = 3
    base_s: float = 0.05
    cap_s: float = 1.0
    failures: int = 5
    open_s: float = 1.0
    open_max_s: float = 5.0


class Circuit(enum.Enum):
    CLOSED = "closed"
    """The store is used."""
    OPEN = "open"
    """The store is left alone."""
    HALF_OPEN = "half_open"
    """One call tries whether the store has recovered; all others wait for it."""


class RetryingStore(WrappedStore):
    """Retries calls that failed with a retryable error, and refuses calls with CircuitOpen, at
    once, while the store is unwell.

    The wait before attempt n is random between 0 and base * 2^n (full jitter). When a store asks
    for fewer requests, all callers of this object wait. A caller whose deadline comes first fails
    at once.

    After a number of failures in a row the circuit opens. When its time is over, one call passes as
    a trial. Success closes the circuit. Failure opens it again for twice as long, up to a limit;
    jitter keeps the servers of a fleet from returning in step. Callers that come during a trial
    wait for its end, as long as between attempts at most: of a batch of blocks not only the first
    is to be had from a store that has recovered. It is logged once when the circuit opens and once
    when it closes.

    Errors that say nothing of the store's health (a missing object, a wrong length) count as
    success. An object that may not be read counts as neither, because all objects may be so. That a
    store is full is logged once an hour.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy,
        total_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(inner)
        self._policy = policy
        self._total_s = total_s
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self._trial_ends = threading.Condition(self._lock)
        self._paused_until = 0.0
        self._failures = 0
        self._open_s = policy.open_s
        self._retry_at = 0.0
        self._cause = ""
        self._log_again_at: dict[type[errors.StoreError], float] = {}
        self._circuit = Circuit.CLOSED

    @property
    def circuit(self) -> Circuit:
        """The state at this moment; other threads change it."""
        return self._circuit

    def __repr__(self) -> str:
        return f"RetryingStore({self._inner!r}, {self.circuit.value})"

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        """A listing that breaks is continued after the last name that it yielded, if all names
        were in order; otherwise names could be left out. Raises EndlessListing after too many
        names."""
        return bounded(self._list(prefix, after, deadline), LISTED_MAX, "objects")

    def _list(self, prefix: str, after: str, deadline: float | None) -> Iterator[ObjectInfo]:
        failures, in_order = 0, True
        while True:
            end = self._end(deadline)
            self._wait_out_pause(end)
            try:
                with self._guarded(end):
                    for info in self._inner.list(prefix, after=after, deadline=deadline):
                        self._succeeded()  # its end may be minutes away
                        in_order = in_order and info.name > after
                        after = info.name
                        failures = 0
                        yield info
                return
            except errors.StoreError as error:
                failures += 1
                if not in_order:
                    raise
                self._wait_or_raise(error, failures, self._end(deadline))

    def _end(self, deadline: float | None) -> float:
        return self._clock() + self._total_s if deadline is None else deadline

    def _call(self, call: Callable[[float | None], _T], deadline: float | None) -> _T:
        end = self._end(deadline)
        failures = 0
        while True:
            self._wait_out_pause(end)
            try:
                with self._guarded(end):
                    return call(end)
            except errors.StoreError as error:
                failures += 1
                self._wait_or_raise(error, failures, end)

    def _wait_or_raise(self, error: errors.StoreError, failures: int, end: float) -> None:
        if not error.retryable or failures >= self._policy.attempts:
            raise error
        longest = min(self._policy.cap_s, self._policy.base_s * 2**failures)
        wait_s = self._rng.uniform(0.0, longest)
        if isinstance(error, errors.RateLimited):
            with self._lock:
                self._paused_until = max(self._paused_until, self._clock() + wait_s)
        if self._clock() + wait_s >= end:
            raise error
        self._sleep(wait_s)

    def _wait_out_pause(self, end: float) -> None:
        wait_s = self._paused_until - self._clock()
        if wait_s <= 0:
            return
        if self._clock() + wait_s >= end:
            raise errors.RateLimited("the store asked for fewer requests a moment ago")
        # with jitter, so that not all callers go on at the same moment
        self._sleep(wait_s + self._rng.uniform(0.0, self._policy.base_s))

    @contextlib.contextmanager
    def _guarded(self, end: float) -> Iterator[None]:
        trial = self._admit(end)
        try:
            yield
        except errors.Forbidden:
            self._end_trial(trial)
            raise
        except errors.StoreError as error:
            if error.unwell:
                self._failed(error, trial)
            else:
                self._succeeded()
            if isinstance(error, _REFUSALS):
                self._log_refusal(error)
            raise
        except BaseException:
            self._end_trial(trial)
            raise
        else:
            self._succeeded()

    def _admit(self, end: float) -> bool:
        """Whether this call is the trial; raises CircuitOpen if it may not pass."""
        with self._lock:
            if self._circuit is Circuit.HALF_OPEN:
                longest = min(self._policy.cap_s, end - self._clock())
                self._trial_ends.wait_for(lambda: self.circuit is not Circuit.HALF_OPEN, longest)
            if self.circuit is Circuit.CLOSED:
                return False
            if self.circuit is Circuit.OPEN and self._clock() >= self._retry_at:
                self._circuit = Circuit.HALF_OPEN
                return True
        raise errors.CircuitOpen(f"left alone for a while, because: {self._cause}")

    def _failed(self, error: errors.StoreError, trial: bool) -> None:
        with self._lock:
            self._failures += 1
            self._cause = str(error)
            trial = self._is_on(trial)
            if trial:
                self._open_s = min(self._open_s * 2, self._policy.open_max_s)
            elif self.circuit is not Circuit.CLOSED or self._failures < self._policy.failures:
                return
            self._retry_at = self._clock() + self._open_s * self._rng.uniform(0.75, 1.0)
            self._enter(Circuit.OPEN)
        if not trial:
            _log.warning("object store unwell, serving goes on without it: %s", error)

    def _succeeded(self) -> None:
        if self._failures == 0 and self.circuit is Circuit.CLOSED:
            return
        with self._lock:
            recovered = self.circuit is not Circuit.CLOSED
            self._enter(Circuit.CLOSED)
            self._failures = 0
            self._open_s = self._policy.open_s
        if recovered:
            _log.info("object store recovered")

    def _log_refusal(self, error: errors.StoreError) -> None:
        now, kind = self._clock(), type(error)
        with self._lock:
            if now < self._log_again_at.get(kind, now):
                return
            self._log_again_at[kind] = now + _LOG_AGAIN_S
        _log.warning("the object store refuses blocks, serving goes on without them: %s", error)

    def _end_trial(self, trial: bool) -> None:
        with self._lock:
            if self._is_on(trial):
                self._enter(Circuit.OPEN)

    def _enter(self, circuit: Circuit) -> None:
        """Tell those who wait for a trial; with the lock."""
        self._circuit = circuit
        self._trial_ends.notify_all()

    def _is_on(self, trial: bool) -> bool:
        """Whether the trial is still under way: the first name of a listing ends it."""
        return trial and self.circuit is Circuit.HALF_OPEN
