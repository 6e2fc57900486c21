"""Audits leave what may be somebody's: when little is known, and beside what the dead have left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import CAPACITY, RECORD, blocks_in, created, filled, opened

from kvtier.backends.object import lock_yield as lock_yield_module
from kvtier.backends.object import writer_ids
from kvtier.backends.object.budget.claim import Claim
from kvtier.backends.object.housekeeping import keeper as keeper_module
from kvtier.backends.object.housekeeping.keeper import Keeper
from kvtier.backends.object.housekeeping.keeper_limits import Limits
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome
from kvtier.backends.object.tier import ObjectTier
from kvtier.eviction import create_policy
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Namespace, Presence


def test_nothing_is_dropped_as_long_as_nobody_knows_what_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first listing takes longer than opening may wait for it."""
    monkeypatch.setattr(keeper_module, "_OPEN_S", 0.0)
    store = FileStore(tmp_path / "store")
    keys = filled(store, 50)
    keeper, tier = opened(store)
    for _ in range(2):
        assert tier.lookup(keys) == [Presence.HIT] * 50
        keeper.refresh()
        tier.tick()
    assert tier.prepare_store(make_keys(1, start=100)).keys
    assert blocks_in(store) == 50


def test_protected_blocks_make_no_room_for_another_namespace(tmp_path: Path) -> None:
    """Though it is the oldest, and all that there is beside."""
    store = FileStore(tmp_path / "store")
    keys = filled(store, 8)
    other = Namespace(facts={"model": "other"}, group_bytes=NAMESPACE.group_bytes)
    spared = {NAMESPACE.id: set(keys[:6])}
    limits = Limits(7 * RECORD, refresh_s=600.0, audit_s=600.0, protected=spared)
    keeper = Keeper(store, other, limits)
    tier = ObjectTier(keeper, create_policy())
    keeper.open(tier.offered)
    tier.start()
    for _ in range(3):
        keeper.ask_for_room()
        keeper.refresh()
    left = {info.name for info in store.list() if "/blocks/" in info.name}
    assert left == {block_name(NAMESPACE.id, key) for key in keys[:6]}
    keeper.close()


def test_the_claims_of_the_dead_stand_until_what_they_left_is_written_down(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    keeper, tier = opened(store)
    [key] = make_keys(1)
    store.put(block_name(NAMESPACE.id, key), [memoryview(bytes(RECORD))])
    dead = writer_ids.new_writer_id()
    writer_ids.mark_ended(dead)
    claim = Claim(NAMESPACE.id, dead, 1, RECORD, CAPACITY, 60_000, "s", False)
    store.put(claim.name, [memoryview(b"")])
    put = store.put

    def refuse(name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        if "/manifest/" in name:
            raise Unavailable("not now")
        return put(name, buffers, **more)

    store.put = refuse  # type: ignore[method-assign]
    keeper.refresh()
    assert store.head(claim.name) is not None
    store.put = put  # type: ignore[method-assign]
    keeper.refresh()
    assert store.head(claim.name) is None
    assert keys_of(Journal(store, NAMESPACE).read_all()) == [key]
    tier.tick()
    assert keeper.budget.used == RECORD


@pytest.mark.parametrize("due", ["next_audit", "needed_audit"])
def test_a_listing_that_failed_is_left_until_the_next_look(tmp_path: Path, due: str) -> None:
    store = FileStore(tmp_path / "store")
    keeper, tier = created(store)
    keeper.open(tier.offered)
    list_some, tried = store.list, 0

    def refuse(prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        nonlocal tried
        if not prefix:
            tried += 1
            raise Unavailable("not now")
        return list_some(prefix, **more)

    store.list = refuse  # type: ignore[method-assign]
    setattr(keeper.schedule, due, 0.0)
    for _ in range(3):
        keeper.run_once()
    assert tried == 1


def opened_with_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[FileStore, Keeper, ObjectTier]:
    """A store with blocks, whose keeper looks for other work after each object of a listing."""
    monkeypatch.setattr(lock_yield_module, "_SLICE_S", -1.0)
    store = FileStore(tmp_path / "store")
    filled(store, 3)
    keeper, tier = created(store)
    keeper.open(tier.offered)
    return store, keeper, tier


def test_what_is_stored_while_everything_is_listed_is_written_down_all_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take minutes."""
    store, keeper, tier = opened_with_yields(tmp_path, monkeypatch)
    tier.start()
    new, written = make_keys(100, start=10), []
    list_all = store.list

    def list_slowly(prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        for info in list_all(prefix, **more):
            if not prefix:
                keeper.outbox.added([new.pop()], [0], [RECORD])
                keeper.schedule.next_look = 0.0
            yield info
            if not prefix:
                written.append(keeper.outbox.empty)

    store.list = list_slowly  # type: ignore[method-assign]
    keeper.refresh()
    assert len(written) > 3
    assert all(written)
    keeper.close()


def test_a_store_is_known_to_be_well_before_all_of_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long outage that comes first, and takes minutes: loads need not wait for it."""
    store, keeper, tier = opened_with_yields(tmp_path, monkeypatch)
    list_all = store.list
    unwell: list[bool] = []

    def list_some(prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
        for info in list_all(prefix, **more):
            if away:
                raise Unavailable("not now")
            keeper.schedule.next_look = 0.0
            yield info
            if not prefix:
                tier.tick()
                unwell.append(tier.unwell)

    store.list = list_some  # type: ignore[method-assign]
    for away in (True, False):
        keeper.schedule.next_audit = 0.0
        keeper.run_once()
        tier.tick()
        assert tier.unwell is away
    assert len(unwell) >= 3
    assert not any(unwell)
    keeper.close()
