"""Audits: beside a busy engine, cut short, and of stores that leave out what they have."""

from __future__ import annotations

import gc
import math
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import (
    RECORD,
    ListedStore,
    blocks_in,
    created,
    filled,
    look,
    opened,
)

from kvtier.backends.object.budget.budget import Grant
from kvtier.backends.object.housekeeping import keeper as keeper_module
from kvtier.backends.object.housekeeping import schedule as schedule_module
from kvtier.backends.object.housekeeping import store_work as store_work_module
from kvtier.backends.object.housekeeping.updates import Update
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, pack_entries
from kvtier.backends.object.object_names import block_name, parse_manifest
from kvtier.backends.object.stores.errors import StoreFull
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo, PutOutcome
from kvtier.record.record import HEADER_BYTES
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import EventKind, Presence


@pytest.fixture
def store(tmp_path: Path) -> ListedStore:
    return ListedStore(tmp_path / "store")


def test_the_garbage_collector_has_nothing_to_visit(store: ListedStore) -> None:
    """A full collection would hold the GIL for as long as all objects of the process take."""
    keys = make_keys(20_000)
    store.hold(keys)
    Journal(store, NAMESPACE).append(
        pack_entries(ADDED, keys, [0] * len(keys), [RECORD] * len(keys), [10**15] * len(keys))
    )
    keeper, tier = opened(store)
    gc.collect()
    before = gc.get_stats()
    keeper.refresh()
    after = gc.get_stats()
    assert after[2]["collections"] == before[2]["collections"]
    assert after[1]["collections"] - before[1]["collections"] <= 1
    assert tier.stats().blocks == len(keys)


def test_what_is_gone_is_told_a_little_at_a_time(store: ListedStore) -> None:
    keys = make_keys(5000)
    store.hold(keys)
    keeper, tier = opened(store)
    store.blocks = []
    keeper.refresh()
    most = 0
    while tier.stats().blocks:
        tier.tick()
        removals = [event for event in tier.take_events() if event.kind is EventKind.REMOVED]
        most = max(most, sum(len(event.keys) for event in removals))
    assert 0 < most <= 1024


class PartialStore(FileStore):
    """A folder of which once something is not listed: so it was with stores that lost a disk, or
    that list from a database which comes behind."""

    hidden: frozenset[str] = frozenset()

    def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        listed = super().list(prefix, **more)
        return (info for info in listed if info.name not in self.hidden)


@pytest.mark.parametrize("hidden", [slice(0, 300), slice(250, 300), slice(100, 256)])
def test_what_a_listing_leaves_out_is_not_gone(tmp_path: Path, hidden: slice) -> None:
    """It would be deleted once it is listed again."""
    store = PartialStore(tmp_path / "store")
    keys = filled(store, 300)
    keeper, tier = opened(store)
    store.hidden = frozenset(block_name(NAMESPACE.id, key) for key in keys[hidden])
    for _ in range(3):
        keeper.refresh()
        tier.tick()
        store.hidden = frozenset()
    assert tier.lookup(keys) == [Presence.HIT] * 300
    assert blocks_in(store) == 300


def test_of_what_has_all_been_deleted_not_each_is_asked_for(tmp_path: Path) -> None:
    """`kvtier clear` beside a running server: of a million that took hours, all of them offered."""
    asked = 0

    class Asked(FileStore):
        def head(self, name: str, **options: Any) -> ObjectInfo | None:
            nonlocal asked
            asked += 1
            return super().head(name, **options)

    store = Asked(tmp_path / "store")
    keys = filled(store, 1000)
    keeper, tier = opened(store)
    store.delete([info.name for info in store.list()])
    keeper.refresh()
    while tier.stats().blocks and len(keeper.updates):
        tier.tick()
    assert tier.lookup(keys) == [Presence.MISS] * 1000
    assert asked <= 5


@pytest.mark.parametrize(("writers", "least", "most"), [(1, 400, 400), (40, 1, 40)])
def test_manifests_are_joined_by_one_of_many_at_a_time(
    store: ListedStore, monkeypatch: pytest.MonkeyPatch, writers: int, least: int, most: int
) -> None:
    """Forty who joined at once left the state there 38 times, all of which was joined again."""
    monkeypatch.setattr(schedule_module, "random", random.Random(1))
    keeper, _ = created(store)
    keeper.schedule.writers = writers
    joined: list[float] = []
    monkeypatch.setattr(keeper._journal, "join", joined.append)
    for _ in range(400):
        keeper._join()
    assert least <= len(joined) <= most


def test_a_store_that_takes_no_manifest_is_served_and_not_listed_at_every_look(
    store: ListedStore,
) -> None:
    listings = 0

    class Full(ListedStore):
        def put(self, name: str, *args: Any, **options: Any) -> PutOutcome:
            if parse_manifest(name):
                raise StoreFull("full, but for what is empty")
            return super().put(name, *args, **options)

        def list(self, prefix: str = "", **options: Any) -> Iterator[ObjectInfo]:
            nonlocal listings
            listings += not prefix
            return super().list(prefix, **options)

    keys = make_keys(3)
    full = Full(store.root)
    full.hold(keys)
    keeper, tier = opened(full)
    assert tier.lookup(keys) == [Presence.HIT] * 3
    for _ in range(5):
        look(keeper, tier)
    assert listings <= 2


def test_temporary_files_that_are_not_ours_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "store")
    torn = store.root / ".tmp-1-dead"
    torn.write_bytes(b"half")
    os.utime(torn, (0, 0))

    unlink = os.unlink

    def refuse(path: str | Path, **at: int) -> None:
        if Path(path).name == torn.name:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, **at)

    keeper, tier = created(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)  # a folder with the sticky bit, as another user
        keeper.open(tier.offered)
    assert torn.exists()
    keeper.refresh()
    assert not torn.exists()


def test_a_budget_that_becomes_small_is_kept_a_little_at_a_time(store: ListedStore) -> None:
    keys = make_keys(2000)
    store.hold(keys)
    keeper, tier = opened(store)
    small = Grant(
        alone=True,
        claim=RECORD,
        cap=100 * RECORD,
        measured=True,
        lease_until=math.inf,
        serial=keeper.budget.serial,
    )
    keeper.updates.append(Update(grant=small))
    counts = [tier.stats().blocks]
    while counts[-1] > 100:
        tier.lookup([])
        counts.append(tier.stats().blocks)
    assert counts[-1] == 100
    assert max(before - after for before, after in pairwise(counts)) <= 128


def test_closing_does_not_wait_for_a_store_that_hangs(
    store: ListedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_module, "_CLOSE_S", 0.1)
    held, release = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> Iterator[ObjectInfo]:
        held.set()
        release.wait()
        return iter(())

    keeper, tier = created(store)
    keeper.open(tier.offered)
    keeper.schedule.next_look = 0.0
    store.list = hang  # type: ignore[method-assign]
    keeper.start()
    assert held.wait(60)
    closed: list[bool] = []
    store.close = lambda: closed.append(True)  # type: ignore[method-assign]
    keeper.close()
    assert "does not answer" in caplog.text
    assert closed, "connections that nobody uses are not left behind"
    release.set()


def test_a_tier_that_nobody_asks_does_not_pile_up_news(store: ListedStore) -> None:
    keeper, tier = opened(store)
    grants = []
    for _ in range(50):
        keeper.schedule.next_look = 0.0
        keeper.run_once()
        grants.append(keeper.updates[0].grant)
    assert len(keeper.updates) == 1
    assert len({id(grant) for grant in grants}) == 50, "the last one is what it hears"
    tier.tick()
    assert not keeper.updates
    keeper.schedule.next_look = 0.0
    keeper.run_once()
    assert len(keeper.updates) == 1


def test_what_others_do_waits_in_the_store_for_a_tier_that_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_work_module, "_UPDATES_MAX", 10)
    store = FileStore(tmp_path / "store")
    keeper, tier = opened(store)
    keeper._lock_yield.alone = False
    keeper.refresh()
    keys, size = make_keys(100), HEADER_BYTES + NAMESPACE.payload_bytes
    neighbour = Journal(store, NAMESPACE)
    for at, key in enumerate(keys):  # one comes, one goes
        store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(size))])
        now_us = int(time.time() * 1e6)
        neighbour.append(pack_entries(ADDED, [key], [0], [size], [now_us]))
        if at >= 10:
            old = keys[at - 10]
            store.delete([block_name(NAMESPACE.id, old)])
            neighbour.append(pack_entries(REMOVED, [old], [0], [0], [now_us]))
        keeper.schedule.next_look = 0.0
        if at % 20 == 0:
            keeper.schedule.next_audit = 0.0
        keeper.run_once()
    assert len(keeper.updates) < 40
    assert [info.name for info in store.list("claims/")], "it is alive all the same"
    while keeper.updates:
        tier.tick()
    keeper.schedule.next_look = 0.0
    keeper.run_once()
    tier.tick()
    assert {key for key, _ in tier.offered()} == set(keys[-10:])


def test_an_audit_takes_little_memory(store: ListedStore) -> None:
    """Millions of blocks may be known, in the process of an engine."""
    keys = make_keys(20_000)
    store.hold(keys)
    keeper, tier = created(store)
    times = range(10**15, 10**15 + 10**9 * len(keys), 10**9)
    Journal(store, NAMESPACE).append(
        pack_entries(ADDED, keys, [0] * len(keys), [RECORD] * len(keys), times)
    )
    keeper.open(tier.offered)
    tier.start()
    tracemalloc.start()
    keeper.refresh()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(piece.added or ()) for piece in keeper.updates) == 1, (
        "the last may be another now"
    )
    assert peak < 170 * len(keys)
