"""A store that fails by a script, and a clock and rng that tests hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.retry import Circuit, RetryingStore, RetryPolicy
from kvtier.backends.object.stores.store import ObjectInfo, PutOutcome, Store
from support.processes import clocks


class ScriptedStore(Store):
    """Raises what the script says, one entry a call; None is success."""

    def __init__(self, script: Sequence[errors.StoreError | None] = ()) -> None:
        self.script = list(script)
        self.calls = 0
        self.names = [f"n{index}" for index in range(6)]

    def _step(self) -> None:
        self.calls += 1
        if self.script and (error := self.script.pop(0)) is not None:
            raise error

    def put(self, *_: Any, **more: Any) -> PutOutcome:
        self._step()
        return PutOutcome.STORED

    def get(self, *_: Any, **more: Any) -> int | None:
        self._step()
        return 0

    def head(self, *_: Any, **more: Any) -> ObjectInfo | None:
        self._step()
        return None

    def list(self, *_: Any, after: str = "", **more: Any) -> Iterator[ObjectInfo]:
        """Breaks after every second name while the script has errors."""
        for index, name in enumerate(name for name in self.names if name > after):
            if index == 2 and self.script:
                self._step()
            yield ObjectInfo(name, 1, 0.0)

    def delete(self, *_: Any, **more: Any) -> Mapping[str, errors.StoreError]:
        self._step()
        return {}


class Clock(clocks.Clock):
    """Remembers who slept how long."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        super().sleep(seconds)


TRANSIENT = errors.Unavailable("rain")
POLICY = RetryPolicy(attempts=4, base_s=0.1, cap_s=0.5, failures=1000)
BREAKING = RetryPolicy(attempts=1, failures=3, open_s=1.0, open_max_s=3.0)


def retrying(inner: Store, clock: Clock, total_s: float = 10.0) -> RetryingStore:
    return RetryingStore(
        inner, POLICY, total_s, clock=clock, sleep=clock.sleep, rng=random.Random(1)
    )


def breaking(inner: Store, clock: Clock, policy: RetryPolicy = BREAKING) -> RetryingStore:
    """Opens the circuit after three failures, and retries nothing."""
    return RetryingStore(inner, policy, 10.0, clock=clock, sleep=clock.sleep, rng=random.Random(1))


def circuit_of(store: RetryingStore) -> Circuit:
    return store.circuit


def get(store: Store, deadline: float | None = None) -> int | None:
    return store.get("name", memoryview(b""), deadline=deadline)


def trip(store: RetryingStore) -> None:
    """Fail as often as opens the circuit."""
    for _ in range(3):
        with pytest.raises(errors.Unavailable):
            get(store)
