"""Retries and the circuit breaker, with a scripted store, a clock and dice that tests hold."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from kvtier.backends.object import errors
from kvtier.backends.object.breaker import BreakerPolicy, BreakerStore, Circuit
from kvtier.backends.object.retry import RetryingStore, RetryPolicy
from kvtier.backends.object.store import Buffer, GetOutcome, ObjectInfo, PutOutcome, Store


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

    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        self._step()
        return PutOutcome.STORED

    def get(
        self,
        name: str,
        into: Sequence[Buffer],
        *,
        offset: int | None = None,
        deadline: float | None = None,
    ) -> GetOutcome:
        self._step()
        return GetOutcome.FOUND

    def get_up_to(
        self, name: str, into: Sequence[Buffer], *, deadline: float | None = None
    ) -> int | None:
        self._step()
        return 0

    def head(self, name: str, *, deadline: float | None = None) -> ObjectInfo | None:
        self._step()
        return None

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        """Breaks after every second name while the script has errors."""
        for index, name in enumerate(name for name in self.names if name > after):
            if index == 2 and self.script:
                self._step()
            yield ObjectInfo(name, 1, 0.0)

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, errors.StoreError]:
        self._step()
        return {}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


WEATHER = errors.Unavailable("rain")
POLICY = RetryPolicy(attempts=4, base_s=0.1, cap_s=0.5)


def retrying(inner: Store, clock: Clock, total_s: float = 10.0) -> RetryingStore:
    return RetryingStore(
        inner, POLICY, total_s, clock=clock, sleep=clock.sleep, dice=random.Random(1)
    )


def breaking(inner: Store, clock: Clock) -> BreakerStore:
    policy = BreakerPolicy(failures=3, open_s=1.0, open_max_s=3.0)
    return BreakerStore(inner, policy, clock=clock, dice=random.Random(1))


def circuit_of(store: BreakerStore) -> Circuit:
    return store.circuit


def get(store: Store, deadline: float | None = None) -> GetOutcome:
    return store.get("name", [], deadline=deadline)


def trip(store: BreakerStore) -> None:
    """Fail as often as opens the circuit."""
    for _ in range(3):
        with pytest.raises(errors.Unavailable):
            get(store)


def test_passing_weather_is_survived() -> None:
    inner, clock = ScriptedStore([WEATHER, WEATHER, WEATHER]), Clock()
    store = retrying(inner, clock)
    assert get(store) is GetOutcome.FOUND
    assert inner.calls == 4
    for wait_s, longest in zip(clock.sleeps, (0.2, 0.4, 0.5), strict=True):
        assert 0 <= wait_s <= longest


def test_retries_are_bounded() -> None:
    inner, clock = ScriptedStore([WEATHER] * 10), Clock()
    with pytest.raises(errors.Unavailable):
        get(retrying(inner, clock))
    assert inner.calls == POLICY.attempts


@pytest.mark.parametrize(
    "error",
    [errors.AccessDenied("no"), errors.LengthMismatch("short"), errors.CircuitOpen("open")],
)
def test_what_no_retry_helps_is_not_retried(error: errors.StoreError) -> None:
    inner, clock = ScriptedStore([error]), Clock()
    with pytest.raises(type(error)):
        get(retrying(inner, clock))
    assert inner.calls == 1
    assert clock.sleeps == []


def test_no_wait_goes_beyond_the_deadline() -> None:
    inner, clock = ScriptedStore([errors.RateLimited("slow", retry_after_s=5.0)]), Clock()
    with pytest.raises(errors.RateLimited):
        get(retrying(inner, clock), deadline=clock.now + 4.0)
    assert clock.sleeps == []


def test_a_store_that_asks_for_a_pause_gets_it_from_every_caller() -> None:
    inner, clock = ScriptedStore([errors.RateLimited("slow", retry_after_s=2.0)]), Clock()
    store = retrying(inner, clock)
    with pytest.raises(errors.RateLimited):
        get(store, deadline=clock.now + 1.0)
    with pytest.raises(errors.RateLimited, match="a moment ago"):
        get(store, deadline=clock.now + 1.0)
    assert inner.calls == 1
    assert get(store) is GetOutcome.FOUND
    assert clock.now >= 1002.0


def test_a_listing_waits_like_everybody_else() -> None:
    inner, clock = ScriptedStore([errors.RateLimited("slow", retry_after_s=2.0)]), Clock()
    store = retrying(inner, clock)
    with pytest.raises(errors.RateLimited):
        get(store, deadline=clock.now + 1.0)
    with pytest.raises(errors.RateLimited, match="a moment ago"):
        list(store.list(deadline=clock.now + 1.0))
    assert inner.calls == 1
    assert [info.name for info in store.list()] == inner.names
    assert clock.now >= 1002.0


def test_a_broken_listing_goes_on_where_it_was() -> None:
    inner, clock = ScriptedStore([WEATHER, WEATHER]), Clock()
    found = [info.name for info in retrying(inner, clock).list()]
    assert found == inner.names


def test_a_listing_that_breaks_again_and_again_ends_unless_it_comes_further() -> None:
    inner, clock = ScriptedStore(), Clock()
    names = [f"n{number:02}" for number in range(20)]

    def breaks(prefix: str = "", *, after: str = "", **_: object) -> Iterator[ObjectInfo]:
        inner.calls += 1
        if inner.calls == 1:
            yield ObjectInfo(names[0], 1, 0.0)
        raise WEATHER

    inner.list = breaks  # type: ignore[method-assign]
    with pytest.raises(errors.Unavailable):
        list(retrying(inner, clock).list())
    assert inner.calls == POLICY.attempts

    def a_name_a_call(prefix: str = "", *, after: str = "", **_: object) -> Iterator[ObjectInfo]:
        for name in names:
            if name > after:
                yield ObjectInfo(name, 1, 0.0)
                raise WEATHER

    inner.list = a_name_a_call  # type: ignore[method-assign]
    assert [info.name for info in retrying(inner, clock).list()] == names


def test_a_broken_listing_in_no_order_ends() -> None:
    """What sorts before the last name would be left out, and taken for gone."""
    inner, clock = ScriptedStore([WEATHER]), Clock()
    inner.names.reverse()
    listing = retrying(inner, clock).list()
    found = [next(listing).name for _ in range(2)]
    inner.script = [WEATHER]
    with pytest.raises(errors.Unavailable):
        found += [info.name for info in listing]
    assert found == inner.names[:2]


def test_the_breaker_opens_and_recovers_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    inner, clock = ScriptedStore([WEATHER] * 5), Clock()
    store = breaking(inner, clock)
    trip(store)
    assert circuit_of(store) is Circuit.OPEN
    for _ in range(100):
        with pytest.raises(errors.CircuitOpen, match="rain"):
            get(store)
    assert inner.calls == 3
    for wait_s in (1.0, 2.0):  # two trials fail, each waits twice as long for the next
        clock.now += wait_s
        with pytest.raises(errors.Unavailable):
            get(store)
        with pytest.raises(errors.CircuitOpen):
            get(store)
    clock.now += 3.0
    assert get(store) is GetOutcome.FOUND
    assert circuit_of(store) is Circuit.CLOSED
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_that_a_store_takes_nothing_is_said_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    """It is no weather: all else works, and the circuit stays closed."""
    full, large = errors.StoreFull("no room"), errors.ObjectTooLarge("too many bytes")
    inner, clock = ScriptedStore([full, large, full] * 20), Clock()
    store = breaking(inner, clock)
    for _ in range(60):
        with pytest.raises((errors.StoreFull, errors.ObjectTooLarge)):
            store.put("name", [])
    assert circuit_of(store) is Circuit.CLOSED
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "no room" in caplog.text
    clock.now += 3600.0
    inner.script = [full]
    with pytest.raises(errors.StoreFull):
        store.put("name", [])
    assert len(caplog.records) == 3


def test_a_listing_that_begins_to_answer_closes_the_circuit() -> None:
    inner, clock = ScriptedStore([WEATHER] * 3), Clock()
    store = breaking(inner, clock)
    trip(store)
    clock.now += 1.0
    listing = store.list()
    assert next(listing).name == inner.names[0]
    assert get(store) is GetOutcome.FOUND
    assert [info.name for info in listing] == inner.names[1:]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_listing_that_has_closed_the_circuit_is_no_trial_any_more(breaks: bool) -> None:
    inner, clock = ScriptedStore([WEATHER] * 3), Clock()
    store = breaking(inner, clock)
    trip(store)
    clock.now += 1.0
    listing = store.list()
    next(listing)
    if breaks:
        inner.script = [WEATHER]
        with pytest.raises(errors.Unavailable):
            list(listing)
    else:
        del listing
    assert circuit_of(store) is Circuit.CLOSED
    assert get(store) is GetOutcome.FOUND


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    refused: list[bool] = []

    class Slow(ScriptedStore):
        def _step(self) -> None:
            super()._step()
            if self.calls == 4:  # the trial: another caller comes while it runs
                with pytest.raises(errors.CircuitOpen):
                    get(store)
                refused.append(True)

    store = breaking(Slow([WEATHER] * 3), clock)
    trip(store)
    clock.now += 1.0
    assert get(store) is GetOutcome.FOUND
    assert refused == [True]


def test_answers_about_an_object_do_not_open_the_breaker() -> None:
    inner, clock = ScriptedStore([errors.LengthMismatch("short")] * 10), Clock()
    store = breaking(inner, clock)
    for _ in range(10):
        with pytest.raises(errors.LengthMismatch):
            get(store)
    assert circuit_of(store) is Circuit.CLOSED


def test_a_trial_that_is_interrupted_decides_nothing() -> None:
    inner, clock = ScriptedStore([WEATHER] * 3), Clock()
    store = breaking(inner, clock)
    trip(store)
    clock.now += 1.0

    def interrupt() -> None:
        assert circuit_of(store) is Circuit.HALF_OPEN
        raise KeyboardInterrupt

    inner._step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        get(store)
    del inner._step  # type: ignore[method-assign]
    assert circuit_of(store) is Circuit.OPEN
    assert get(store) is GetOutcome.FOUND


def test_retries_stop_when_the_breaker_opens() -> None:
    inner, clock = ScriptedStore([WEATHER] * 10), Clock()
    store = retrying(breaking(inner, clock), clock)
    with pytest.raises(errors.CircuitOpen):
        get(store)
    assert inner.calls == 3


def test_many_names_are_deleted_in_portions_that_each_have_the_time_of_a_call() -> None:
    clock = Clock()
    portions = []

    class SlowStore(ScriptedStore):
        def delete(
            self, names: Sequence[str], *, deadline: float | None = None
        ) -> Mapping[str, errors.StoreError]:
            assert deadline is not None
            portions.append((len(names), deadline - clock.now))
            clock.now += 8.0
            self._step()
            return {name: errors.AccessDenied("locked") for name in names if name.endswith("999")}

    store = retrying(SlowStore([None, WEATHER]), clock, total_s=10.0)
    failed = store.delete([f"n{number}" for number in range(2500)])
    assert sorted(failed) == ["n1999", "n999"]
    counts = [count for count, _ in portions]
    assert counts == [1000, 1000, 1000, 500], "one of them twice"
    assert [round(left) for count, left in portions if count] == [10, 10, 2, 10]
