"""Long work of a keeper: audits take little, and all else goes on; and what waits meanwhile."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import (
    CAPACITY,
    RECORD,
    ListedStore,
    UnwellStore,
    blocks_in,
    filled,
    look,
    no_full_listing,
    nothing_at_all,
    opened,
)

from kvtier.backends.object import gil_yield, queues
from kvtier.backends.object import keeper as keeper_module
from kvtier.backends.object.budget import Budget
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.manifests import ADDED, REMOVED, SKEW_US, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.queues import Outbox
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo
from kvtier.backends.object.tier import ObjectTier
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Presence

NOW_US = 1_700_000_000_000_000


def known(store: ListedStore, count: int) -> tuple[Keeper, ObjectTier]:
    """So many blocks that lie there, and are recorded."""
    keys = make_keys(count)
    store.hold(keys)
    entries = pack_entries(ADDED, keys, [0] * count, [RECORD] * count, 10**15)
    Journal(store, NAMESPACE.id).append(entries)
    return opened(store)


# -- audits ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_makes_nothing_for_the_garbage_collector(tmp_path: Path) -> None:
    """A full collection would hold the GIL for as long as all objects of the process take."""
    keeper, _ = known(ListedStore(tmp_path / "store"), 20_000)
    gc.collect()
    before = gc.get_stats()[2]["collections"]
    keeper.refresh()
    assert gc.get_stats()[2]["collections"] == before


@pytest.mark.slow
def test_an_audit_takes_little_memory(tmp_path: Path) -> None:
    """Millions of blocks may be known, in the process of an engine."""
    count = 20_000
    keeper, _ = known(ListedStore(tmp_path / "store"), count)
    tracemalloc.start()
    keeper._next_audit = 0.0
    keeper.run_once()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * count


def test_nothing_is_evicted_before_the_first_listing_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than opening may wait for it: nobody knows what is there."""
    monkeypatch.setattr(keeper_module, "_OPEN_S", -1.0)
    store = UnwellStore(tmp_path / "store")
    keys = filled(store, 50)
    keeper, tier = opened(store, 10 * RECORD)
    well, store.fails = store.fails, no_full_listing
    for _ in range(2):
        look(keeper, tier)
        assert tier.lookup(keys) == [Presence.HIT] * 50
        assert not tier.prepare_store(make_keys(1, start=100)).keys, "nor is anything stored"
    store.fails = well
    assert blocks_in(store) == 50
    keeper.refresh()
    look(keeper, tier)
    assert blocks_in(store) == 10
    keeper.close()


def test_what_is_stored_amid_a_listing_is_recorded_all_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes; and the store is known to be well before it ends."""
    monkeypatch.setattr(gil_yield, "_SLICE_S", -1.0)
    store = FileStore(tmp_path / "store")
    filled(store, 3)
    keeper, _ = opened(store)
    new, recorded, unwell = make_keys(100, start=10), [], []
    list_all = store.list

    def list_slowly(prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        for info in list_all(prefix, **more):
            if not prefix:
                keeper.outbox.added([new.pop()], [0], [RECORD])
                keeper._next_look = 0.0
            yield info
            if not prefix:
                recorded.append(not keeper.outbox._entries)
                unwell.append(keeper.unwell)

    store.list = list_slowly  # type: ignore[method-assign]
    keeper.unwell = True  # as after an outage
    keeper._next_look = keeper._next_audit = 0.0
    keeper.run_once()
    assert len(recorded) > 3
    assert all(recorded)
    assert not any(unwell)
    keeper.close()


# -- a tier that nobody asks -------------------------------------------------------------------


@pytest.mark.parametrize("is_caretaker", [True, False])
def test_what_others_do_waits_in_the_store_for_a_tier_that_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_caretaker: bool
) -> None:
    monkeypatch.setattr(keeper_module, "_UPDATES_MAX", 10)
    store = FileStore(tmp_path / "store")
    first = opened(store) if not is_caretaker else None
    keeper, tier = opened(store)
    assert (keeper.caretaker is not None) == is_caretaker
    keeper._yield.alone = False
    keys, neighbour = make_keys(100), Journal(store, NAMESPACE.id)
    for at, key in enumerate(keys):  # one comes, one goes
        store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(RECORD))])
        now_us = int(time.time() * 1e6)
        neighbour.append(pack_entries(ADDED, [key], [0], [RECORD], [now_us]))
        if at >= 10:
            old = keys[at - 10]
            store.delete([block_name(NAMESPACE.id, old)])
            neighbour.append(pack_entries(REMOVED, [old], [0], [0], [now_us]))
        if first is not None:
            look(*first)
        keeper._next_look = 0.0
        keeper.run_once()
    assert len(keeper.updates) < 40
    assert keeper.caretaker is None or not keeper.caretaker.news
    while keeper.updates:
        tier.tick()
    keeper._next_resync = 0.0
    look(keeper, tier)
    while keeper.updates:
        tier.tick()
    assert {key for key, _ in tier.offered()} == set(keys[-10:])
    for each in (keeper, *(first or ())[:1]):
        each.close()


# -- the outbox --------------------------------------------------------------------------------


def test_what_is_recorded_later_has_a_later_time_by_whatever_clock(tmp_path: Path) -> None:
    now = [NOW_US]
    journal = Journal(FileStore(tmp_path / "store"), NAMESPACE.id)
    outbox = Outbox(journal, Budget(CAPACITY, RECORD), lambda: now[0] / 1e6)
    key = make_keys(1)
    assert outbox.added(key, [0], [7]) == pytest.approx(NOW_US / 1e6, abs=2e-6)
    now[0] -= 10**9
    outbox.removed([(key[0], 0)])
    outbox.record()
    [entry] = journal.read_all()
    assert entry["kind"] == REMOVED
    assert NOW_US - 2 <= entry["time_us"] <= NOW_US + 2
    outbox.observe_time(NOW_US + 700)
    assert outbox.now_us() == NOW_US + 701, "later than what others have recorded"
    outbox.observe_time(1 << 53)
    assert outbox.now_us() <= now[0] + SKEW_US + 1, "unless their clocks are wrong beyond belief"


def test_room_is_settled_when_it_is_recorded_and_once_in_as_many_manifests_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_ENTRIES_MAX", 4)
    store, keys = UnwellStore(tmp_path / "store"), make_keys(10)
    journal, budget = Journal(store, NAMESPACE.id), Budget(CAPACITY, RECORD)
    budget.grant(100, seen=-1, until=1e18)
    outbox = Outbox(journal, budget)
    for at in range(0, 10, 2):
        budget.reserve(10)
        outbox.added(keys[at : at + 2], [0, 0], [5, 5])
    well, store.fails = store.fails, nothing_at_all
    for _ in range(2):
        with pytest.raises(StoreError):
            outbox.record()
    assert outbox._entries
    store.fails = well
    outbox.record()
    assert not outbox._entries
    assert len(list(store.list())) == 3
    assert sorted(keys_of(journal.read_all())) == sorted(keys)
    assert budget.room == 50, "until the caretaker has seen it"
    budget.grant(100, seen=journal.number - 1, until=1e18)
    assert budget.room == 100
