"""Much at once: deletes take minutes, and what must be said fills more than one manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from support.object.simulated_fleet import BLOCK_BYTES, NAMESPACE, CountingStore

from kvtier.backends.object import lock_yield as lock_yield_module
from kvtier.backends.object.housekeeping.audit import Unfinished
from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.keeper_limits import Limits
from kvtier.backends.object.manifests import outbox as outbox_module
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries, pack_entries
from kvtier.backends.object.object_names import block_name, parse_block
from kvtier.backends.object.stores.errors import (
    AccessDenied,
    CircuitOpen,
    StoreError,
    Unavailable,
    WrongRegion,
)
from kvtier.backends.object.stores.store import Buffer, PutOutcome
from kvtier.backends.object.tier import ObjectTier
from kvtier.eviction import create_policy
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey

AT_ONCE = 10
BLOCKS = 100 * AT_ONCE
AGE_MAX_S = 1000.0


class SlowDeletes(CountingStore):
    """A second for every portion of blocks; remembers when claims were put."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed_at: list[float] = []
        self.deletes = 0
        self.keeper: Keeper | None = None
        self.stops_at = -1
        """At which delete the keeper is told to stop."""

    deletes_at_once = AT_ONCE

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        if name.startswith("claims/"):
            self.claimed_at.append(self.now)
        return super().put(name, buffers, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        if names and parse_block(names[0]):
            assert len(names) <= AT_ONCE
            self.now += 1.0
            self.deletes += 1
            if self.deletes == self.stops_at:
                assert self.keeper is not None
                self.keeper._stopping = True
        return super().delete(names, **more)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SlowDeletes:
    monkeypatch.setattr(lock_yield_module, "_SLICE_S", -1.0)
    store = SlowDeletes()
    keys = make_keys(BLOCKS)
    for key in keys:
        store.put(block_name(NAMESPACE.id, key), [])
    times = [int(store.now * 1e6)] * BLOCKS
    Journal(store, NAMESPACE).append(
        pack_entries(ADDED, keys, [0] * BLOCKS, [BLOCK_BYTES] * BLOCKS, times)
    )
    return store


def opened(store: SlowDeletes) -> tuple[Keeper, ObjectTier]:
    limits = Limits(1 << 40, refresh_s=5.0, audit_s=600.0, age_max_s=AGE_MAX_S)
    keeper = Keeper(store, NAMESPACE, limits, clock=store.clock, steady=store.clock)
    tier = ObjectTier(keeper, create_policy(), store.clock)
    keeper.open(tier.offered)
    tier.start()
    assert tier.stats().blocks == BLOCKS
    store.keeper = keeper
    return keeper, tier


@pytest.mark.parametrize("how", ["cleared", "too old"])
def test_claims_are_renewed(store: SlowDeletes, how: str) -> None:
    keeper, tier = opened(store)
    if how == "cleared":
        tier.clear()
    else:
        store.now += AGE_MAX_S + 1.0
    store.claimed_at = [store.now]
    keeper.run_once()
    keeper.refresh()
    assert store.deletes == BLOCKS / AT_ONCE
    longest = max(later - at for at, later in pairwise([*store.claimed_at, store.now]))
    assert longest <= keeper.limits.lease_s / 2
    while keeper.updates:
        tier.tick()
    assert tier.stats().blocks == keeper.budget.deleting == 0


@pytest.mark.parametrize("count", [1, 10 * AT_ONCE])
def test_what_was_stored_is_written_down_when_it_is_due_though_something_is_deleted(
    store: SlowDeletes, count: int
) -> None:
    """Who drops something all the time would never say what he has."""
    keeper, tier = opened(store)
    keys = make_keys(BLOCKS)
    [new] = make_keys(1, start=BLOCKS)
    neighbour = Journal(store, NAMESPACE)
    store.now += keeper.limits.refresh_s
    tier.forget(keys[:count])
    keeper.outbox.added([new], [0], [BLOCK_BYTES])
    keeper.run_once()
    assert keeper.outbox.empty
    stated = neighbour.read_all()
    assert stated["kind"].tolist().count(REMOVED) == count
    assert new in keys_of(stated)


def test_who_closes_does_not_wait_for_them(store: SlowDeletes) -> None:
    keeper, _ = opened(store)
    store.now += AGE_MAX_S + 1.0
    store.stops_at = 3
    with pytest.raises(Unfinished):
        keeper._audit()
    assert store.deletes == 3


def test_claims_are_renewed_while_what_is_known_is_compared(store: SlowDeletes) -> None:
    """Millions of blocks take longer than a lease."""
    keeper, tier = opened(store)

    def slowly() -> Iterator[tuple[BlockKey, int]]:
        for one in tier.offered():
            store.now += 0.1
            yield one

    keeper._offered = slowly
    store.claimed_at = [store.now]
    keeper.refresh()
    assert max(later - at for at, later in pairwise(store.claimed_at)) <= keeper.limits.lease_s / 2
    tier.tick()
    assert (tier.stats().blocks, keeper.budget.used) == (BLOCKS, BLOCKS * BLOCK_BYTES)


def test_who_closes_while_others_are_listened_to_ends_in_peace(
    store: SlowDeletes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two batches of deletes, in the keeper's own thread."""
    keeper, tier = opened(store)
    keys = make_keys(1, start=BLOCKS)
    Journal(store, NAMESPACE).append(
        pack_entries(ADDED, keys, [0], [BLOCK_BYTES], [int(store.now * 1e6)])
    )
    tier.clear()
    store.now += keeper.limits.refresh_s
    news = keeper._journal.read_new

    def stop_then_tell() -> Entries:
        keeper._stopping = True
        return news()

    monkeypatch.setattr(keeper._journal, "read_new", stop_then_tell)
    keeper.run_once()
    assert store.deletes == 1


@pytest.mark.parametrize("how", ["cleared", "not written down"])
def test_no_manifest_takes_longer_than_a_put_may(
    store: SlowDeletes, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_ENTRIES_MAX", 300)
    before = {info.name for info in store.list(f"{NAMESPACE.id}/manifest/")}
    if how == "not written down":
        store.delete(list(before))
    keeper, tier = opened(store)
    if how == "cleared":
        tier.clear()
    keeper.flush()
    found = [info for info in store.list(f"{NAMESPACE.id}/manifest/") if info.name not in before]
    assert len(found) == (4 if how == "cleared" else 2)
    assert sum(info.size for info in found) >= 64 * BLOCKS
    assert max(info.size for info in found) <= 64 * 600


class LockedBlocks(CountingStore):
    """Will not delete a block until it is allowed; remembers when it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.locked = True
        self.asked_at: list[float] = []

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        if self.locked and names and parse_block(names[0]):
            self.asked_at.append(self.now)
            return {name: AccessDenied("it is locked") for name in names}
        return super().delete(names, **more)


class RefusedDeletes(CountingStore):
    """Answers whatever deletes blocks with an error, if there is one."""

    error: StoreError | None = None

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        if self.error is not None and names and parse_block(names[0]):
            raise self.error
        return super().delete(names, **more)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WrongRegion("the store is elsewhere"), 1),
        (AccessDenied("not you"), 1),
        (Unavailable("not now"), 0),
        (CircuitOpen("left alone"), 0),
    ],
)
def test_a_store_that_deletes_nothing_is_said_once_until_it_does(
    error: StoreError, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of weather the breaker tells. What else it may be leaves the store well, but filling up."""
    store = RefusedDeletes()
    store.error = error
    limits = Limits(1 << 40, refresh_s=5.0, audit_s=600.0)
    keeper = Keeper(store, NAMESPACE, limits, clock=store.clock, steady=store.clock)
    keeper.open(lambda: iter(()))
    [key] = make_keys(1)
    for again in (1, 2):
        keeper.outbox.delete(1, [(key, 0)])
        for _ in range(3):
            keeper.run_once()
        warnings = [one for one in caplog.records if one.levelname == "WARNING"]
        assert len(warnings) == again * said
        assert all(str(error) in one.getMessage() for one in warnings)
        store.error = None
        keeper.run_once()
        assert keeper.outbox.empty
        store.error = error
    keeper.close()


def test_what_is_locked_is_asked_for_less_and_less_and_goes_in_the_end() -> None:
    store = LockedBlocks()
    keys = make_keys(4)
    limits = Limits(1 << 40, refresh_s=5.0, audit_s=600.0)
    keeper = Keeper(store, NAMESPACE, limits, clock=store.clock, steady=store.clock)
    tier = ObjectTier(keeper, create_policy(), store.clock)
    keeper.open(tier.offered)
    tier.start()
    assert tier.prepare_store(keys).keys == keys
    for key in keys:
        store.put(block_name(NAMESPACE.id, key), [])
    tier.complete_store(keys)
    tier.flush()
    tier.forget(keys)

    def pass_time(seconds: float) -> None:
        end = store.now + seconds
        while store.now < end:
            store.now += 1.0
            keeper.run_once()
            tier.tick()

    pass_time(3600.0)
    gaps = [later - at for at, later in pairwise(store.asked_at)]
    assert gaps[0] <= 2 * limits.refresh_s
    assert max(gaps) > 20 * limits.refresh_s
    assert len(gaps) < 24, "of 720 looks, and six audits, which try, too"
    assert keeper.budget.deleting == 4 * BLOCK_BYTES
    store.locked = False
    pass_time(1200.0)
    assert keeper.budget.deleting == 0
    keeper.close()
