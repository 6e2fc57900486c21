"""Retries and the circuit breaker, with a scripted store, a clock and rng that tests hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from support.object.scripted_store import (
    BREAKING,
    POLICY,
    TRANSIENT,
    Clock,
    ScriptedStore,
    breaking,
    circuit_of,
    get,
    retrying,
    trip,
)

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.retry import Circuit
from kvtier.backends.object.stores.store import ObjectInfo

SOON = 1e-9
"""A deadline that leaves no time to wait."""


def test_passing_weather_is_survived() -> None:
    inner, clock = ScriptedStore([TRANSIENT, TRANSIENT, TRANSIENT]), Clock()
    store = retrying(inner, clock)
    assert get(store) is not None
    assert inner.calls == 4
    for wait_s, longest in zip(clock.sleeps, (0.2, 0.4, 0.5), strict=True):
        assert 0 < wait_s < longest, "not all who failed at once come again at once"


def test_retries_are_bounded() -> None:
    inner, clock = ScriptedStore([TRANSIENT] * 10), Clock()
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
    inner, clock = ScriptedStore([errors.RateLimited("slow")]), Clock()
    with pytest.raises(errors.RateLimited):
        get(retrying(inner, clock), deadline=clock.now + SOON)
    assert clock.sleeps == []


def test_nor_does_a_listing_or_a_wait_in_it() -> None:
    inner, clock = ScriptedStore(), Clock()
    deadlines: list[object] = []

    def slow(prefix: str = "", *, after: str = "", **limits: object) -> Iterator[ObjectInfo]:
        deadlines.append(limits["deadline"])
        raise errors.Unavailable("slow")
        yield

    inner.list = slow  # type: ignore[method-assign]
    end = clock.now + SOON
    with pytest.raises(errors.Unavailable):
        list(retrying(inner, clock).list(deadline=end))
    assert deadlines == [end]
    assert clock.sleeps == []


def test_a_store_that_asks_for_a_pause_gets_it_from_every_caller() -> None:
    inner, clock = ScriptedStore([errors.RateLimited("slow")]), Clock()
    store = retrying(inner, clock)
    with pytest.raises(errors.RateLimited):
        get(store, deadline=clock.now + SOON)
    calls = (lambda end: get(store, end), lambda end: list(store.list(deadline=end)))
    for call in calls:
        with pytest.raises(errors.RateLimited, match="a moment ago"):
            call(clock.now + SOON)
    assert inner.calls == 1
    assert get(store) is not None
    assert len(clock.sleeps) == 1, "the pause, and not all callers end it at the same moment"


def test_a_server_that_is_away_for_one_call_keeps_no_other_waiting() -> None:
    inner, clock = ScriptedStore([errors.Unavailable("rain")]), Clock()
    store = retrying(inner, clock)
    with pytest.raises(errors.Unavailable):
        get(store, deadline=clock.now + SOON)
    assert get(store, deadline=clock.now + SOON) is not None
    assert clock.sleeps == []


def test_a_listing_that_breaks_again_and_again_ends_unless_it_comes_further() -> None:
    inner, clock = ScriptedStore(), Clock()
    names = [f"n{number:02}" for number in range(20)]

    def breaks(prefix: str = "", *, after: str = "", **_: object) -> Iterator[ObjectInfo]:
        inner.calls += 1
        if inner.calls == 1:
            yield ObjectInfo(names[0], 1, 0.0)
        raise TRANSIENT

    inner.list = breaks  # type: ignore[method-assign]
    with pytest.raises(errors.Unavailable):
        list(retrying(inner, clock).list())
    assert inner.calls == POLICY.attempts

    def a_name_a_call(prefix: str = "", *, after: str = "", **_: object) -> Iterator[ObjectInfo]:
        for name in names:
            if name > after:
                yield ObjectInfo(name, 1, 0.0)
                raise TRANSIENT

    inner.list = a_name_a_call  # type: ignore[method-assign]
    assert [info.name for info in retrying(inner, clock).list()] == names


def test_a_broken_listing_in_no_order_ends() -> None:
    """What sorts before the last name would be left out, and taken for gone."""
    inner, clock = ScriptedStore([TRANSIENT]), Clock()
    inner.names.reverse()
    listing = retrying(inner, clock).list()
    found = [next(listing).name for _ in range(2)]
    inner.script = [TRANSIENT]
    with pytest.raises(errors.Unavailable):
        found += [info.name for info in listing]
    assert found == inner.names[:2]

    def breaks(prefix: str = "", *, after: str = "", **_: object) -> Iterator[ObjectInfo]:
        yield from (ObjectInfo(name, 1, 0.0) for name in ("n2", "n1", "n3") if name > after)
        raise TRANSIENT

    inner.list = breaks  # type: ignore[method-assign]
    with pytest.raises(errors.Unavailable):
        list(retrying(inner, clock).list())
    assert clock.sleeps == []


def test_retries_stop_when_the_breaker_opens() -> None:
    inner, clock = ScriptedStore([TRANSIENT] * 10), Clock()
    store = breaking(inner, clock, msgspec.structs.replace(BREAKING, attempts=9))
    with pytest.raises(errors.CircuitOpen):
        get(store)
    assert inner.calls == 3


def test_many_names_are_deleted_in_portions_that_each_have_the_time_of_a_call() -> None:
    clock = Clock()
    batches = []

    class SlowStore(ScriptedStore):
        def delete(
            self, names: Sequence[str], *, deadline: float | None = None
        ) -> Mapping[str, errors.StoreError]:
            assert deadline is not None
            batches.append((len(names), deadline - clock.now))
            clock.now += 8.0
            self._step()
            return {name: errors.AccessDenied("locked") for name in names if name.endswith("999")}

    store = retrying(SlowStore([None, TRANSIENT]), clock, total_s=10.0)
    failed = store.delete([f"n{number}" for number in range(2500)])
    assert sorted(failed) == ["n1999", "n999"]
    counts = [count for count, _ in batches]
    assert counts == [1000, 1000, 1000, 500], "one of them twice"
    assert [round(left) for count, left in batches if count] == [10, 10, 2, 10]


def test_the_breaker_opens_and_recovers_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    inner, clock = ScriptedStore([TRANSIENT] * 5), Clock()
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
    assert get(store) is not None
    assert circuit_of(store) is Circuit.CLOSED
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    inner.script = [TRANSIENT] * 3
    trip(store)
    clock.now += 1.0
    assert get(store) is not None, "it is left alone as briefly as at first"


def test_calls_that_were_on_their_way_put_off_no_trial(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    class Slow(ScriptedStore):
        def _step(self) -> None:
            if self.calls == 0:  # the circuit opens while this call waits for its answer
                self.calls = 1
                trip(store)
                clock.now += 0.5
            super()._step()

    store = breaking(Slow([TRANSIENT] * 4), clock)
    with pytest.raises(errors.Unavailable):
        get(store)
    clock.now += 0.5
    assert get(store) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


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


@pytest.mark.parametrize("breaks", [False, True])
def test_a_listing_that_has_closed_the_circuit_is_no_trial_any_more(breaks: bool) -> None:
    inner, clock = ScriptedStore([TRANSIENT] * 3), Clock()
    store = breaking(inner, clock)
    trip(store)
    clock.now += 1.0
    listing = store.list()
    next(listing)
    if breaks:
        inner.script = [TRANSIENT]
        with pytest.raises(errors.Unavailable):
            list(listing)
    else:
        del listing
    assert circuit_of(store) is Circuit.CLOSED
    assert get(store) is not None


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    refused: list[bool] = []

    class Slow(ScriptedStore):
        def _step(self) -> None:
            super()._step()
            if self.calls == 4:  # the trial: another caller comes while it runs
                with pytest.raises(errors.CircuitOpen):
                    get(store, deadline=clock.now + SOON)
                refused.append(True)

    store = breaking(Slow([TRANSIENT] * 3), clock)
    trip(store)
    clock.now += 1.0
    assert get(store) is not None
    assert refused == [True]


@pytest.mark.parametrize("recovers", [True, False])
def test_who_comes_during_a_trial_waits_for_its_end(recovers: bool) -> None:
    """So all of a batch comes from a store that has recovered, and one that has not is spared."""
    clock, waiting = Clock(), threading.Semaphore(0)

    class Slow(ScriptedStore):
        def _step(self) -> None:
            super()._step()
            if self.calls == 4:
                for _ in others:
                    waiting.acquire()
                if not recovers:
                    raise TRANSIENT

    inner = Slow([TRANSIENT] * 3)
    store = breaking(inner, clock)
    waits = store._trial_ends.wait_for

    def seen(*args: Any) -> bool:
        waiting.release()  # whoever ends the trial needs the lock, which is held until it waits
        return waits(*args)

    store._trial_ends.wait_for = seen  # type: ignore[method-assign]
    trip(store)
    clock.now += 1.0
    with ThreadPoolExecutor(4) as pool:
        others = range(3)
        calls = [pool.submit(get, store) for _ in range(4)]
        failed = [call.exception() for call in calls]
    if recovers:
        assert failed == [None] * 4
    else:
        kinds = sorted(type(error).__name__ for error in failed)
        assert (kinds, inner.calls) == (["CircuitOpen"] * 3 + ["Unavailable"], 4)


def test_answers_about_an_object_say_that_the_store_is_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    short = errors.LengthMismatch("short")
    inner, clock = ScriptedStore([TRANSIENT, TRANSIENT, short] * 2), Clock()
    store = breaking(inner, clock)
    for _ in range(6):
        with pytest.raises((errors.Unavailable, errors.LengthMismatch)):
            get(store)
    assert circuit_of(store) is Circuit.CLOSED
    assert caplog.records == []
    inner.script = [TRANSIENT] * 3 + [short]
    trip(store)
    clock.now += 1.0
    with pytest.raises(errors.LengthMismatch):
        get(store)
    assert circuit_of(store) is Circuit.CLOSED


def test_that_an_object_may_not_be_read_says_nothing_of_the_store() -> None:
    closed = errors.Forbidden("another's")
    inner, clock = ScriptedStore([TRANSIENT, TRANSIENT, closed, TRANSIENT, closed]), Clock()
    store = breaking(inner, clock)
    for _ in range(4):
        with pytest.raises((errors.Unavailable, errors.Forbidden)):
            get(store)
    assert circuit_of(store) is Circuit.OPEN
    clock.now += 1.0
    with pytest.raises(errors.Forbidden):
        get(store)
    assert circuit_of(store) is Circuit.OPEN
    assert get(store) is not None, "the next one tries again, at once"


def test_a_trial_that_is_interrupted_decides_nothing() -> None:
    inner, clock = ScriptedStore([TRANSIENT] * 3), Clock()
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
    assert get(store) is not None
