"""What a caretaker makes of what it finds: evicts the least worth, corrects, deletes, leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import (
    RECORD,
    Clock,
    LastWins,
    LockedStore,
    UnwellStore,
    blocks_in,
    created,
    filled,
    look,
    no_full_listing,
    nothing_at_all,
    opened,
)

from kvtier.backends.object.caretaker import Caretaker
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.keeper import Keeper
from kvtier.backends.object.lease import LEASE_S, PATIENCE
from kvtier.backends.object.manifests import ADDED, REMOVED, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import StoreFull, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo, PutOutcome
from kvtier.backends.object.tier import ObjectTier
from kvtier.backends.object.use_counts import Uses
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Namespace, Presence

HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> UnwellStore:
    return UnwellStore(tmp_path / "store")


def put(store: FileStore, key: BlockKey, ago_s: float = 0.0, generation: int = 0) -> None:
    name = block_name(NAMESPACE.id, key, generation)
    store.put(name, [memoryview(bytes(RECORD))])
    os.utime(store.root / name, (time.time() - ago_s,) * 2)


def record(store: FileStore, kind: int, key: BlockKey, ago_s: float, size: int = RECORD) -> None:
    at_us = int((time.time() - ago_s) * 1e6)
    Journal(store, NAMESPACE.id).append(pack_entries(kind, [key], [0], [size], [at_us]))


def hits(tier: ObjectTier, keys: list[BlockKey]) -> list[BlockKey]:
    tier.tick()
    return [
        key for key, found in zip(keys, tier.lookup(keys), strict=True) if found is Presence.HIT
    ]


def caretaker_of(keeper: Keeper) -> Caretaker:
    assert keeper.caretaker is not None
    return keeper.caretaker


def crowded(store: FileStore, capacity: int, **more: Any) -> tuple[Keeper, ObjectTier]:
    """A server of another model beside those blocks, which needs room."""
    other = Namespace(facts={"model": "other"}, group_bytes=NAMESPACE.group_bytes)
    return opened(store, capacity, namespace=other, **more)


def make_room(keeper: Keeper, tier: ObjectTier) -> None:
    tier.prepare_store(make_keys(8, start=1000))
    look(keeper, tier)


def test_until_the_election_is_over_nothing_is_stored(tmp_path: Path) -> None:
    """In a store without conditional puts. What is there is served, and who opens a tier waits."""
    store, clock = LastWins(tmp_path / "store"), Clock()
    keys = filled(store, 3)
    keeper, tier = opened(store, 8 * RECORD, steady=clock)
    assert hits(tier, keys) == keys
    assert keeper.caretaker is None
    assert not tier.prepare_store(make_keys(1, start=9)).keys
    clock.at = keeper._lease.decided_at
    keeper.run_once()
    assert caretaker_of(keeper).report.measured
    tier.tick()
    assert len(tier.prepare_store(make_keys(8, start=9), evict=False).keys) == 5
    keeper.close()


# -- shares ------------------------------------------------------------------------------------


class Server:
    """One that looks when it is told to, by a clock that the test moves."""

    def __init__(self, store: FileStore, blocks: int, clock: Clock) -> None:
        self.keeper, self.tier = opened(store, blocks * RECORD, steady=clock, audit_s=1e6)
        self._store = store

    def look(self) -> None:
        look(self.keeper, self.tier)

    def store(self, first: int, count: int = 4) -> int:
        """How many of so many blocks it may store now, and does."""
        reserved = self.tier.prepare_store(make_keys(count, start=first))
        for key, number in zip(reserved.keys, reserved.spec.generations, strict=True):
            put(self._store, key, generation=number)
        self.tier.complete_store(reserved.keys)
        return len(reserved.keys)


def two_of_three_full(store: FileStore, clock: Clock) -> tuple[Server, Server, Server]:
    """Three servers of one budget; the caretaker and another have used their shares."""
    caretaker, prompt, idle = servers = tuple(Server(store, 12, clock) for _ in range(3))
    for server in servers * 2:
        server.look()
    assert [caretaker.store(0), prompt.store(100)] == [4, 4]
    return caretaker, prompt, idle


def test_a_share_of_an_earlier_report_counts_until_nobody_can_use_it(store: FileStore) -> None:
    """A server reads a report late: what it was granted before is not granted to others."""
    clock = Clock()
    caretaker, prompt, late = two_of_three_full(store, clock)
    for _ in range(2):
        prompt.look()
        caretaker.look()
    assert [caretaker.store(200), prompt.store(300), late.store(400)] == [0, 0, 4]
    assert blocks_in(store) == 12


def test_a_share_that_was_not_used_is_granted_to_others_again(store: FileStore) -> None:
    """Once it has run out, and its server has said that it lives and so has recorded everything."""
    clock = Clock()
    servers = caretaker, _, _ = two_of_three_full(store, clock)
    for server in servers[:2] * 2:
        server.look()
    assert caretaker.keeper.budget.room == 0, "the other server may use what is free"
    clock.at += PATIENCE * caretaker_of(caretaker.keeper).report.share_s
    for server in (*servers, *servers, *servers):
        server.look()
    assert [server.keeper.budget.room // RECORD for server in servers] == [1, 1, 1]


# -- evicting ----------------------------------------------------------------------------------


def test_what_nobody_used_goes_before_what_is_as_old_and_was_used(store: FileStore) -> None:
    keys = make_keys(8)
    for key in keys:
        put(store, key)
        record(store, ADDED, key, ago_s=HOUR)
    used = keys[::2]
    uses = Uses(store, NAMESPACE.id, "ab" * 8, 0.0)
    uses.note(used)
    uses.close()
    keeper, tier = crowded(store, 8 * RECORD)
    make_room(keeper, tier)
    left = {info.name for info in store.list(f"{NAMESPACE.id}/blocks/")}
    assert len(left) < 8
    assert left >= {block_name(NAMESPACE.id, key) for key in used}
    state = Journal(store, NAMESPACE.id).read_all()
    assert len(left) == (state["kind"] == ADDED).sum(), "others hear of it"
    keeper.close()


def test_what_is_retained_by_a_server_that_lives_goes_last(store: FileStore) -> None:
    keys = filled(store, 8)
    neighbour, theirs = opened(store, 8 * RECORD)
    theirs.retain_at_most(6)
    theirs.retain(keys[:6], "session", time.time() + HOUR)
    theirs.tick()
    neighbour.uses._next = 0.0
    look(neighbour, theirs)
    neighbour._lease.close()
    keeper, tier = crowded(store, 8 * RECORD)
    make_room(keeper, tier)
    left = {info.name for info in store.list(f"{NAMESPACE.id}/blocks/")}
    assert left == {block_name(NAMESPACE.id, key) for key in keys[:6]}
    look(neighbour, theirs)
    assert hits(theirs, keys) == keys[:6]
    for each in (neighbour, keeper):
        each.close()


def test_what_is_protected_stays_whatever_is_needed(store: FileStore) -> None:
    keys = filled(store, 8)
    spared = {NAMESPACE.id: set(keys[:7])}
    keeper, tier = crowded(store, 7 * RECORD, protected=spared)
    for _ in range(3):
        make_room(keeper, tier)
    left = {info.name for info in store.list(f"{NAMESPACE.id}/blocks/")}
    assert left == {block_name(NAMESPACE.id, key) for key in keys[:7]}
    keeper.close()


def test_a_smaller_capacity_is_kept_and_foreign_objects_stay(store: FileStore) -> None:
    filled(store, 8)
    store.put("notes/mine", [memoryview(bytes(RECORD))])
    keeper, tier = opened(store, 3 * RECORD)
    look(keeper, tier)
    assert blocks_in(store) == 3
    assert tier.stats().blocks == 3
    assert store.head("notes/mine") is not None
    keeper.close()


def test_the_largest_capacity_counts(store: FileStore, caplog: pytest.LogCaptureFixture) -> None:
    """One test with a small capacity must not empty the bucket of all."""
    filled(store, 8)
    large, theirs = opened(store, 100 * RECORD)
    large._lease.close()
    small, tier = opened(store, RECORD)
    look(small, tier)
    assert caretaker_of(small).report.capacity == 100 * RECORD
    assert blocks_in(store) == 8
    assert "different capacities" in caplog.text
    for each in (large, small):
        each.close()
    assert theirs


# -- auditing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "there", "found", "stays"),
    [
        ([(ADDED, 500.0)], 500.0, True, True),
        ([], 500.0, True, True),  # its server died before it said so
        ([(ADDED, 500.0)], None, False, False),  # somebody deleted it
        ([(ADDED, 500.0), (REMOVED, 100.0)], 500.0, False, False),  # the delete was lost
        ([(ADDED, 500.0), (REMOVED, 100.0)], 50.0, False, False),  # who knows: a miss is safe
        ([(ADDED, 3 * HOUR), (REMOVED, 2 * HOUR)], 50.0, True, True),  # stored again since
    ],
)
def test_one_object(
    store: FileStore,
    recorded: list[tuple[int, float]],
    there: float | None,
    found: bool,
    stays: bool,
) -> None:
    [key] = make_keys(1)
    keeper, tier = opened(store)
    for kind, ago_s in recorded:
        record(store, kind, key, ago_s, RECORD if kind == ADDED else 0)
    caretaker_of(keeper)._read(NAMESPACE.id)
    caretaker_of(keeper)._doomed.clear()  # as if its predecessor had died amid it
    if there is not None:
        put(store, key, there)
    keeper._next_audit = 0.0
    keeper.run_once()
    look(keeper, tier)
    assert hits(tier, [key]) == [key] * found
    assert blocks_in(store) == stays
    state = Journal(store, NAMESPACE.id).read_all()
    assert keys_of(state[state["kind"] == ADDED]) == [key] * found
    keeper.close()


@pytest.mark.parametrize("hidden", [slice(0, 300), slice(250, 300), slice(100, 256)])
def test_what_a_listing_leaves_out_is_not_gone(tmp_path: Path, hidden: slice) -> None:
    """So it was with stores that lost a disk, or that list from a database which comes behind."""

    class Partial(FileStore):
        hidden: frozenset[str] = frozenset()

        def list(self, prefix: str = "", **more: Any) -> Iterator[ObjectInfo]:
            listed = super().list(prefix, **more)
            return (info for info in listed if info.name not in self.hidden)

    store = Partial(tmp_path / "store")
    keys = filled(store, 300)
    keeper, tier = opened(store)
    store.hidden = frozenset(block_name(NAMESPACE.id, key) for key in keys[hidden])
    for _ in range(3):
        keeper.refresh()
        assert hits(tier, keys) == keys
        store.hidden = frozenset()
    assert blocks_in(store) == 300


def test_old_manifests_are_read_and_old_claims_go(store: FileStore) -> None:
    """Of the first alpha: entries without a last use are as they were, claims count nothing."""
    keys = filled(store, 3)
    claim = f"claims/{NAMESPACE.id}-{'ab' * 16}-0000000001-5-9-9-60000-sn"
    for name in (claim, claim.replace("-5-", "-6-")):
        store.put(name, [])
    os.utime(store.root / claim, (0, 0))
    keeper, tier = opened(store)
    keeper.refresh()
    assert hits(tier, keys) == keys
    assert [info.name for info in store.list("claims/")] == [claim.replace("-5-", "-6-")]
    keeper.close()


def test_what_is_locked_is_counted_and_tried_again_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LockedStore(tmp_path / "store")
    keys = filled(store, 8)
    store.locked = lambda name: "/blocks/" in name
    keeper, tier = opened(store, 8 * RECORD)
    tier.forget(keys[:2])
    look(keeper, tier)
    assert blocks_in(store) == 8
    assert not tier.prepare_store(make_keys(1, start=99), evict=False).keys, "there is no room"
    for _ in range(2):
        keeper.refresh()
        tier.tick()
    assert hits(tier, keys) == keys[2:], "dropped is dropped"
    assert caplog.text.count("cannot be deleted") <= 4
    store.locked = lambda name: False
    keeper.refresh()
    look(keeper, tier)
    assert blocks_in(store) == 6
    assert tier.prepare_store(make_keys(1, start=99), evict=False).keys
    keeper.close()


# -- errors ------------------------------------------------------------------------------------


def test_a_listing_that_failed_is_left_until_the_next_look(store: UnwellStore) -> None:
    keeper, _ = opened(store)
    asked: list[str] = []

    def refuse(call: str, name: str) -> Unavailable | None:
        asked.append(f"{call} {name}")
        return no_full_listing(call, name)

    store.fails = refuse
    keeper._next_audit = 0.0
    for _ in range(3):
        keeper.run_once()
    assert asked.count("list ") == 1
    assert keeper.unwell


def test_a_store_that_is_full_gets_room(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity is more than the folder can hold."""
    keys = filled(store, 128)
    keeper, tier = opened(store, 128 * RECORD)
    take = FileStore.put

    def full(self: FileStore, name: str, *args: Any, **more: Any) -> PutOutcome:
        if blocks_in(self) >= 128:
            raise StoreFull("full")
        return take(self, name, *args, **more)

    monkeypatch.setattr(FileStore, "put", full)
    keeper._lease._renewed_at -= 0.5 * LEASE_S  # so that there is something to write
    look(keeper, tier)
    look(keeper, tier)
    assert blocks_in(store) < 128
    assert len(hits(tier, keys)) == blocks_in(store)
    state = Journal(store, NAMESPACE.id).read_all()
    assert (state["kind"] == ADDED).sum() == blocks_in(store)
    keeper.close()


def test_who_could_reach_the_store_only_later_leaves_its_place_too(store: UnwellStore) -> None:
    keeper, tier = created(store)
    well, store.fails = store.fails, nothing_at_all
    with pytest.raises(Unavailable):
        keeper.open(tier.offered)
    tier.start()
    store.fails = well
    look(keeper, tier)
    assert keeper.caretaker is not None
    keeper.close()
    assert list(store.list("servers/")) == []
    late, _ = opened(store)
    assert late.caretaker is not None
    late.close()


def test_what_nobody_thought_of_ends_no_keeper_and_is_said_once(
    store: UnwellStore, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, _ = opened(store)
    well, store.fails = store.fails, lambda call, name: MemoryError()
    for _ in range(3):
        keeper._next_look = 0.0
        keeper.run_once()
    assert keeper.unwell
    store.fails = well
    keeper._next_look = 0.0
    keeper.run_once()
    assert not keeper.unwell
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    keeper.close()


def test_a_term_that_could_not_begin_begins_at_a_later_look(store: UnwellStore) -> None:
    """Its first look at what is there fails, and nobody else can be the caretaker meanwhile."""
    keys = filled(store, 3)
    well, store.fails = store.fails, no_full_listing
    keeper, tier = created(store)
    with pytest.raises(Unavailable):
        keeper.open(tier.offered)
    store.fails = well
    look(keeper, tier)
    look(keeper, tier)
    assert keeper.caretaker is not None
    assert hits(tier, keys) == keys
    assert tier.prepare_store(make_keys(1, start=99)).keys
    keeper.close()
