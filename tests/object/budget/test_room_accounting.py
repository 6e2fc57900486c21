"""Room that blocks take and give: what is evicted, dropped, failed or read for the last time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import RECORD, blocks_in, created, look

from kvtier.backends.object import writer_ids
from kvtier.backends.object.budget.budget import Grant
from kvtier.backends.object.budget.claim import Claim
from kvtier.backends.object.housekeeping.updates import Update
from kvtier.backends.object.manifests.block_rows import Rows
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.spec import ObjectSpec
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Buffer, PutOutcome
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Outcome, Presence, Reservation

ROOM = 4
OLD = make_keys(ROOM)
NEW = make_keys(ROOM, start=100)


class World:
    """A server with room for four blocks, whose keeper works when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.store = FileStore(folder / "store")
        self.keeper, self.tier = created(self.store, ROOM * RECORD)
        self.budget = self.keeper.budget
        self.keeper.open(self.tier.offered)
        self.tier.start()

    def put(self, keys: Sequence[BlockKey]) -> None:
        reservation = self.tier.prepare_store(keys)
        assert reservation.keys == list(keys)
        self.write(reservation)
        self.tier.complete_store(keys)

    def write(self, reservation: Reservation) -> None:
        """As the handler does."""
        spec = reservation.spec
        assert isinstance(spec, ObjectSpec)
        self.store.delete([name for names in spec.delete_first for name in names])
        for key, generation in zip(reservation.keys, spec.generations, strict=True):
            name = block_name(NAMESPACE.id, key, generation)
            self.store.put(name, [memoryview(bytes(RECORD))])

    def look(self) -> None:
        look(self.keeper, self.tier)

    def counted(self) -> tuple[int, int, int]:
        sizes = self.budget.used, self.budget.uncatalogued, self.budget.deleting
        return sizes[0] // RECORD, sizes[1] // RECORD, sizes[2] // RECORD

    def stated(self) -> dict[BlockKey, int]:
        entries = Journal(self.store, NAMESPACE).read_all()
        return dict(zip(keys_of(entries), entries["kind"].tolist(), strict=True))

    def apply(
        self, cap: int, claim: int = ROOM, dead: int = 0, lease_until: float = math.inf
    ) -> None:
        """So many blocks are all that we may hold, alone."""
        standing = Grant(
            alone=True,
            claim=claim * RECORD,
            dead=dead * RECORD,
            cap=cap * RECORD,
            measured=cap > 0,
            lease_until=lease_until,
            serial=self.budget.serial,
        )
        self.keeper.updates.append(Update(grant=standing))

    def on_its_way(self) -> int:
        """Blocks that are counted as reserved and not written down."""
        return self.budget._pending // RECORD


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.put(OLD)
    world.tier.flush()
    assert world.counted() == (ROOM, 0, 0)
    assert world.on_its_way() == 0
    return world


def test_what_is_evicted_gives_its_room_to_a_block_each(world: World) -> None:
    reservation = world.tier.prepare_store(NEW[:2])
    assert isinstance(reservation.spec, ObjectSpec)
    names = [[block_name(NAMESPACE.id, key)] for key in reservation.evicted]
    assert reservation.spec.delete_first == names
    assert world.counted() == (ROOM, 0, 0)
    world.write(reservation)
    world.tier.complete_store(NEW[:2])
    world.tier.flush()
    assert world.counted() == (ROOM, 0, 0)
    assert blocks_in(world.store) == ROOM
    said = dict.fromkeys(reservation.evicted, REMOVED) | dict.fromkeys(NEW[:2], ADDED)
    assert world.stated().items() >= said.items()
    world.put(reservation.evicted)
    names = [info.name for info in world.store.list(f"{NAMESPACE.id}/blocks")]
    assert len(names) == ROOM
    assert all(name.endswith("-0") for name in names), "nothing of their names is left"


@pytest.mark.parametrize("came", [False, True])
def test_a_store_that_fails_frees_the_room_of_what_was_evicted_when_both_are_deleted(
    world: World, came: bool
) -> None:
    """Nobody knows how far the handler came."""
    [new] = NEW[:1]
    reservation = world.tier.prepare_store([new])
    [victim] = reservation.evicted
    if came:
        world.write(reservation)
    world.tier.complete_store([new], {new: Outcome.TIMEOUT})
    assert world.counted() == (ROOM - 1, 0, 1)
    assert world.on_its_way() == 1
    world.look()
    assert world.counted() == (ROOM - 1, 0, 0)
    assert world.on_its_way() == 0
    assert blocks_in(world.store) == ROOM - 1
    assert world.stated()[victim] == world.stated()[new] == REMOVED
    assert world.tier.lookup([victim, new]) == [Presence.MISS] * 2


def test_what_is_dropped_while_it_is_read_is_said_at_once_and_deleted_afterwards(
    world: World,
) -> None:
    [key] = OLD[:1]
    world.tier.prepare_load([key])
    world.tier.forget([key])
    assert world.on_its_way() == 1, "nothing tells of it, and it is there"
    world.look()
    assert world.stated()[key] == REMOVED
    assert world.counted() == (ROOM, 0, 0)
    assert blocks_in(world.store) == ROOM
    world.tier.complete_load([key])
    assert world.counted() == (ROOM - 1, 0, 1)
    world.look()
    assert world.counted() == (ROOM - 1, 0, 0)
    assert world.on_its_way() == 0
    assert blocks_in(world.store) == ROOM - 1


def test_what_is_stored_anew_while_the_former_is_deleted_has_another_name(world: World) -> None:
    [key] = OLD[:1]
    world.tier.forget([key])
    reservation = world.tier.prepare_store([key])
    assert isinstance(reservation.spec, ObjectSpec)
    assert reservation.spec.generations == [1]
    world.write(reservation)
    world.tier.complete_store([key])
    world.look()
    assert world.tier.lookup([key]) == [Presence.HIT]
    assert world.store.head(block_name(NAMESPACE.id, key, 0)) is None
    assert world.store.head(block_name(NAMESPACE.id, key, 1)) is not None
    world.tier.forget([key])
    world.look()
    assert world.store.head(block_name(NAMESPACE.id, key, 1)) is None
    assert world.counted() == (ROOM - 2, 0, 0), "it has taken the room of another"


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.IO_ERROR])
def test_what_is_damaged_is_deleted_for_all(world: World, outcome: Outcome) -> None:
    [key] = OLD[:1]
    world.tier.prepare_load([key])
    world.tier.complete_load([key], {key: outcome})
    assert world.tier.stats().corrupt == (outcome is Outcome.CORRUPT)
    world.look()
    assert world.counted() == (ROOM - 1, 0, 0)
    assert blocks_in(world.store) == ROOM - 1
    assert world.stated()[key] == REMOVED


def test_what_is_gone_is_written_down_and_takes_no_room(world: World) -> None:
    [key] = OLD[:1]
    world.store.delete([block_name(NAMESPACE.id, key)])
    world.tier.prepare_load([key])
    world.tier.complete_load([key], {key: Outcome.GONE})
    assert world.counted() == (ROOM - 1, 0, 0)
    world.look()
    assert world.stated()[key] == REMOVED
    assert world.tier.lookup([key]) == [Presence.MISS]


def test_what_the_weather_kept_from_being_read_is_counted_and_found_again(world: World) -> None:
    [key] = OLD[:1]
    world.tier.prepare_load([key])
    world.tier.complete_load([key], {key: Outcome.TIMEOUT})
    assert world.tier.lookup([key]) == [Presence.MISS]
    assert world.counted() == (ROOM - 1, 1, 0)
    for _ in range(2):  # both find it, and nobody has listened in between
        world.keeper.refresh()
    assert world.tier.lookup([key]) == [Presence.HIT]
    assert world.counted() == (ROOM, 0, 0)


def test_beside_others_too_little_room_is_claimed_soon(world: World) -> None:
    claim = Claim(
        NAMESPACE.id, writer_ids.new_writer_id(), 1, RECORD, ROOM * RECORD, 60_000, "s", False
    )
    world.store.put(claim.name, [])
    world.look()
    assert not world.budget.alone
    world.keeper.schedule.next_look = world.keeper._steady() + 1.0
    demand = world.budget._demand
    reservation = world.tier.prepare_store(NEW)
    assert (reservation.keys, reservation.evicted) == ([], []), "others may evict the same"
    assert world.budget._demand == demand + len(NEW) * RECORD
    world.keeper.run_once()
    assert world.keeper.schedule.next_look > world.keeper._steady() + 500.0, "it has looked"
    soon = world.keeper.schedule.next_look = world.keeper._steady() + 100.0
    world.keeper.run_once()
    assert world.keeper.schedule.next_look == soon, "and hurries no more"
    writer_ids.mark_ended(claim.writer)


def test_joining_that_the_store_would_not_have_is_not_tried_at_every_look(world: World) -> None:
    """It may be gigabytes."""
    neighbour = Journal(world.store, NAMESPACE)
    for key in make_keys(20, start=200):
        neighbour.append(pack_entries(ADDED, [key], [0], [0], [1]))
    put, tried = world.store.put, 0

    def refuse(name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        nonlocal tried
        if "/manifest/" in name:
            tried += 1
            raise Unavailable("not now")
        return put(name, buffers, **more)

    world.store.put = refuse  # type: ignore[method-assign]
    for _ in range(3):
        world.look()
    assert tried == 1
    world.store.put = put  # type: ignore[method-assign]
    world.keeper.schedule.next_join = 0.0
    for _ in range(2):
        world.look()
    assert len(list(world.store.list(f"{NAMESPACE.id}/manifest/"))) == 1


@pytest.mark.parametrize(("cap", "needs_room"), [(1, True), (2, False), (3, False)])
def test_who_evicts_though_he_has_less_than_half_wants_room_of_others(
    world: World, cap: int, needs_room: bool
) -> None:
    world.apply(cap)
    world.tier.tick()
    world.keeper.outbox.delete_queued()
    world.tier.tick()
    assert world.counted() == (cap, 0, 0)
    assert len(world.tier.prepare_store(NEW[:1]).evicted) == 1
    assert world.keeper._claims.cap.needs_room == needs_room


@pytest.mark.parametrize(
    ("heard", "deleting"),
    [
        ({"cap": ROOM, "lease_until": 1.0}, 0),  # the store was away for long, or the machine slept
        ({"cap": ROOM, "claim": 0}, 0),  # so much was stored at once
        ({"cap": 0}, 0),  # nobody has listed everything yet
        ({"cap": ROOM, "dead": 1}, 0),  # nor what is there of a server that died
        ({"cap": ROOM}, 1),  # the store has still to delete what was too much
    ],
)
def test_nothing_is_evicted_where_that_makes_no_room(
    world: World, heard: dict[str, Any], deleting: int
) -> None:
    world.apply(**heard)
    world.budget.deleting = deleting * RECORD
    reservation = world.tier.prepare_store(NEW)
    assert (reservation.keys, reservation.evicted) == ([], [])
    assert world.tier.lookup(OLD) == [Presence.HIT] * ROOM
    assert world.tier.stats().dropped == ROOM


def test_no_more_is_evicted_than_the_claim_has_room_for(world: World) -> None:
    world.apply(ROOM, claim=2)
    assert len(world.tier.prepare_store(NEW).keys) == 2
    assert world.tier.lookup(OLD).count(Presence.HIT) == ROOM - 2


def test_what_was_evicted_and_is_not_room_enough_is_deleted_all_the_same(world: World) -> None:
    """Blocks may be compressed: the room of one is not that of another."""
    extra = make_keys(2, start=300)
    reservation = world.tier.prepare_store(NEW[:1])
    world.tier.complete_store(NEW[:1], {NEW[0]: Outcome.TIMEOUT})
    world.look()
    kept = [key for key in OLD if key not in reservation.evicted]
    small = kept[0]
    neighbour = Journal(world.store, NAMESPACE)
    sizes = [RECORD // 2, RECORD // 2, RECORD]
    keys = [small, *extra]
    neighbour.append(pack_entries(ADDED, keys, [0] * 3, sizes, [int(time.time() * 1e6)] * 3))
    world.look()
    assert world.budget.used == ROOM * RECORD
    world.tier.prepare_load([*kept[1:], *keys[1:]])
    reservation = world.tier.prepare_store(NEW[1:2])
    assert (reservation.keys, reservation.evicted) == ([], [small])
    used = ROOM * RECORD - RECORD // 2
    assert (world.budget.used, world.budget.deleting) == (used, RECORD // 2)
    world.look()
    assert (world.budget.used, world.budget.deleting) == (used, 0)
    assert world.store.head(block_name(NAMESPACE.id, small)) is None
    assert world.stated()[small] == REMOVED


def test_no_more_is_dropped_than_is_still_too_much(world: World) -> None:
    world.apply(ROOM - 2)
    gone = Rows(OLD[:2], [0] * 2, [0] * 2, [time.time()] * 2)
    world.keeper.updates.append(Update(removed=gone))
    world.tier.tick()
    assert world.counted() == (ROOM - 2, 0, 0)
    assert world.tier.lookup(OLD) == [Presence.MISS] * 2 + [Presence.HIT] * 2


def test_a_reservation_says_until_when_its_room_may_be_written_to(world: World) -> None:
    reservation = world.tier.prepare_store(NEW[:1])
    assert isinstance(reservation.spec, ObjectSpec)
    assert reservation.spec.until == world.budget._grant.lease_until
    assert reservation.spec.until < math.inf


def test_of_two_that_are_stored_one_may_fail(world: World) -> None:
    reservation = world.tier.prepare_store(NEW[:2])
    world.write(reservation)
    world.tier.complete_store(NEW[:2], {NEW[0]: Outcome.IO_ERROR})
    assert world.counted() == (ROOM - 1, 0, 1)
    world.look()
    assert world.counted() == (ROOM - 1, 0, 0)
    assert world.tier.lookup(NEW[:2]) == [Presence.MISS, Presence.HIT]
    assert [world.stated()[key] for key in reservation.evicted] == [REMOVED] * 2
    world.tier.forget(NEW[1:2])
    assert world.budget.deleting == RECORD
    [(_, objects)] = world.keeper.outbox._deletes
    assert objects == [(NEW[1], 0)], "and not once more what it has taken the room of"


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.ok])
def test_what_was_dropped_while_it_is_read_may_fail(world: World, outcome: Outcome) -> None:
    [key] = OLD[:1]
    world.tier.prepare_load([key])
    world.tier.forget([key])
    world.tier.complete_load([key], {key: outcome})
    world.look()
    assert world.counted() == (ROOM - 1, 0, 0)
    assert world.on_its_way() == 0
