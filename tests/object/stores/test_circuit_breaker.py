"""The circuit breaker, with a scripted store, a clock and rng that tests hold."""

from __future__ import annotations

import logging

import pytest
from support.object.scripted_store import (
    TRANSIENT,
    Clock,
    ScriptedStore,
    breaking,
    circuit_of,
    get,
    trip,
)

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.circuit_breaker import Circuit


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
                    get(store)
                refused.append(True)

    store = breaking(Slow([TRANSIENT] * 3), clock)
    trip(store)
    clock.now += 1.0
    assert get(store) is not None
    assert refused == [True]


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
