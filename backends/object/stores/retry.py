"""Bounded retries with jitter around any store, and a shared pause when it asks for one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from kvtier.backends.object.stores.errors import RateLimited, StoreError
from kvtier.backends.object.stores.store import LISTED_MAX, ObjectInfo, Store, bounded
from kvtier.backends.object.stores.wrapper import WrappedStore

_T = TypeVar("_T")


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often to try, and the least and the longest wait between two attempts."""

    attempts: int = 3
    base_s: float = 0.05
    cap_s: float = 1.0


class RetryingStore(WrappedStore):
    """Retries calls that failed with a retryable error, within the deadline of the call.

    The wait before attempt n is random between 0 and base * 2^n (full jitter), and at least what
    the store asked for. When a store asks for fewer requests, all callers of this object wait. A
    caller whose deadline comes first fails at once.
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
        self._paused_until = 0.0

    def __repr__(self) -> str:
        return f"RetryingStore({self._inner!r})"

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
            self._wait_out_pause(self._end(deadline))
            try:
                for info in self._inner.list(prefix, after=after, deadline=deadline):
                    in_order = in_order and info.name > after
                    after = info.name
                    failures = 0
                    yield info
                return
            except StoreError as error:
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
                return call(end)
            except StoreError as error:
                failures += 1
                self._wait_or_raise(error, failures, end)

    def _wait_or_raise(self, error: StoreError, failures: int, end: float) -> None:
        if not error.retryable or failures >= self._policy.attempts:
            raise error
        longest = min(self._policy.cap_s, self._policy.base_s * 2**failures)
        wait_s = max(self._rng.uniform(0.0, longest), error.retry_after_s)
        if isinstance(error, RateLimited):
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
            raise RateLimited("the store asked for fewer requests a moment ago")
        # with jitter, so that not all callers go on at the same moment
        self._sleep(wait_s + self._rng.uniform(0.0, self._policy.base_s))
