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
    """How often to try, and how long to wait between two tries at least and at most."""

    attempts: int = 3
    base_s: float = 0.05
    cap_s: float = 1.0


class RetryingStore(WrappedStore):
    """Tries again what may pass, within the call's deadline and never beyond it.

    The wait before try n is random between nothing and base * 2^n (full jitter), and at least what
    the store asked for. When a store asks for fewer requests, every caller of this object waits,
    or gives up at once if its deadline comes first.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy,
        total_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        dice: random.Random | None = None,
    ) -> None:
        super().__init__(inner)
        self._policy = policy
        self._total_s = total_s
        self._clock = clock
        self._sleep = sleep
        self._dice = dice or random.Random()
        self._lock = threading.Lock()
        self._quiet_until = 0.0

    def __repr__(self) -> str:
        return f"RetryingStore({self._inner!r})"

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        """A listing that breaks goes on behind the last name it gave out, if all before it were in
        order: what was not listed yet would be left out otherwise. One of too many names ends with
        EndlessListing."""
        return bounded(self._list(prefix, after, deadline), LISTED_MAX, "objects")

    def _list(self, prefix: str, after: str, deadline: float | None) -> Iterator[ObjectInfo]:
        failures, in_order = 0, True
        while True:
            self._keep_quiet(self._end(deadline))
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
            self._keep_quiet(end)
            try:
                return call(end)
            except StoreError as error:
                failures += 1
                self._wait_or_raise(error, failures, end)

    def _wait_or_raise(self, error: StoreError, failures: int, end: float) -> None:
        if not error.retryable or failures >= self._policy.attempts:
            raise error
        longest = min(self._policy.cap_s, self._policy.base_s * 2**failures)
        wait_s = max(self._dice.uniform(0.0, longest), error.retry_after_s)
        if isinstance(error, RateLimited):
            with self._lock:
                self._quiet_until = max(self._quiet_until, self._clock() + wait_s)
        if self._clock() + wait_s >= end:
            raise error
        self._sleep(wait_s)

    def _keep_quiet(self, end: float) -> None:
        wait_s = self._quiet_until - self._clock()
        if wait_s <= 0:
            return
        if self._clock() + wait_s >= end:
            raise RateLimited("the store asked for fewer requests a moment ago")
        # not all at the same moment afterwards
        self._sleep(wait_s + self._dice.uniform(0.0, self._policy.base_s))
