"""Retries, with a scripted store, a clock and rng that tests hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from support.object.scripted_store import (
    POLICY,
    TRANSIENT,
    Clock,
    ScriptedStore,
    breaking,
    get,
    retrying,
)

from kvtier.backends.object.stores import errors
from kvtier.backends.object.stores.store import ObjectInfo


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
    inner, clock = ScriptedStore([errors.RateLimited("slow", retry_after_s=5.0)]), Clock()
    with pytest.raises(errors.RateLimited):
        get(retrying(inner, clock), deadline=clock.now + 4.0)
    assert clock.sleeps == []


def test_nor_does_a_listing_or_a_wait_in_it() -> None:
    inner, clock = ScriptedStore(), Clock()
    deadlines: list[object] = []

    def slow(prefix: str = "", *, after: str = "", **limits: object) -> Iterator[ObjectInfo]:
        deadlines.append(limits["deadline"])
        raise errors.Unavailable("slow", retry_after_s=5.0)
        yield

    inner.list = slow  # type: ignore[method-assign]
    end = clock.now + 4.0
    with pytest.raises(errors.Unavailable):
        list(retrying(inner, clock).list(deadline=end))
    assert deadlines == [end]
    assert clock.sleeps == []


def test_a_store_that_asks_for_a_pause_gets_it_from_every_caller() -> None:
    inner, clock = ScriptedStore([errors.RateLimited("slow", retry_after_s=2.0)]), Clock()
    store = retrying(inner, clock)
    with pytest.raises(errors.RateLimited):
        get(store, deadline=clock.now + 1.0)
    with pytest.raises(errors.RateLimited, match="a moment ago"):
        get(store, deadline=clock.now + 1.0)
    assert inner.calls == 1
    assert get(store) is not None
    assert clock.now > 1002.0, "and not all of them end at the same moment"


def test_a_shorter_pause_ends_no_longer_one() -> None:
    clock = Clock()

    class Busy(ScriptedStore):
        def _step(self) -> None:
            if self.calls == 0:  # another caller is answered while this one waits
                self.calls = 1
                with pytest.raises(errors.RateLimited):
                    get(store, deadline=clock.now + 1.0)
            super()._step()

    pauses = [errors.RateLimited("slow", retry_after_s=seconds) for seconds in (5.0, 2.0)]
    store = retrying(Busy(pauses), clock)
    with pytest.raises(errors.RateLimited):
        get(store, deadline=clock.now + 1.0)
    with pytest.raises(errors.RateLimited, match="a moment ago"):
        get(store, deadline=clock.now + 4.0)
    assert get(store) is not None


def test_a_server_that_is_away_for_one_call_keeps_no_other_waiting() -> None:
    inner, clock = ScriptedStore([errors.Unavailable("rain", retry_after_s=2.0)]), Clock()
    store = retrying(inner, clock)
    with pytest.raises(errors.Unavailable):
        get(store, deadline=clock.now + 1.0)
    assert get(store, deadline=clock.now + 1.0) is not None
    assert clock.sleeps == []


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
    store = retrying(breaking(inner, clock), clock)
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
