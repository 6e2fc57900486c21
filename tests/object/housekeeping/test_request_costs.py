"""What servers on one bucket ask of it, in time that only pretends to pass."""

from __future__ import annotations

import random

import pytest
from support.object.simulated_fleet import BLOCK_BYTES, NAMESPACE, CountingStore, Fleet

from kvtier.backends.object.budget.budget import UNLIMITED
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.types import Namespace

HOUR = 3600.0
SERVERS = 8


class FailingStore(CountingStore):
    """May be away."""

    away = False
    in_vain = 0

    def _count(self, request: str, name: str, times: int = 1) -> None:
        if self.away:
            self.in_vain += 1
            raise Unavailable("not now")
        super()._count(request, name, times)


@pytest.fixture
def store() -> FailingStore:
    random.seed(1)
    return FailingStore()


def begun(store: FailingStore, blocks_a_second: float = 0.0) -> Fleet:
    fleet = Fleet(store, SERVERS, blocks_a_second=blocks_a_second)
    fleet.run(300.0)
    store.requests.clear()
    return fleet


@pytest.mark.slow
def test_one_of_all_lists_everything_each_audit(store: FailingStore) -> None:
    fleet = begun(store)
    fleet.run(HOUR)
    assert 3 <= store.requests["LIST everything"] <= 10, "six, but for the rng"


def test_the_last_one_left_lists_as_often_as_all_did(store: FailingStore) -> None:
    fleet = begun(store)
    for keeper, _ in fleet.servers[1:]:
        keeper.close()
    del fleet.servers[1:]
    fleet.run(60.0)
    store.requests.clear()
    fleet.run(HOUR)
    assert store.requests["LIST everything"] >= 4


@pytest.mark.slow
def test_an_idle_server_looks_and_renews_its_claim(store: FailingStore) -> None:
    fleet = begun(store)
    fleet.run(HOUR)
    for request, a_server in (
        ("LIST claims", 910),
        ("LIST manifest", 730),
        ("PUT claims", 185),
        ("DELETE everything", 185),
    ):
        assert store.requests.pop(request) <= a_server * SERVERS
    del store.requests["LIST everything"]
    assert not store.requests


@pytest.mark.slow
def test_a_busy_server_writes_down_once_a_look(store: FailingStore) -> None:
    fleet = begun(store, blocks_a_second=2.0)
    fleet.run(600.0)
    assert fleet.stored > SERVERS * 1100
    assert store.requests["PUT manifest"] <= SERVERS * 150, "its own, and what it joins"
    assert store.requests["GET manifest"] <= SERVERS * 1200
    assert fleet.objects() < 100


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1_000_000, 16_384])
def test_prompts_that_come_now_and_then_are_kept(store: FailingStore, blocks: int) -> None:
    """A prompt comes all at once, after minutes in which nothing did; also where the bucket is full
    to what all keep room for."""
    fleet = Fleet(store, 4, capacity_blocks=blocks, blocks_a_second=20.0)
    fleet.run(240.0)
    assert (len(fleet.blocks()) > 0.7 * blocks) is (blocks < 20_000), "only one of them is full"
    fleet.rate = 0.0
    fleet.run(120.0)
    fleet.stored = fleet.dropped = 0
    for _ in range(8):
        fleet.run(60.0)
        for _, tier in fleet.servers:
            fleet.fill(tier, 48)
    assert (fleet.stored, fleet.dropped) == (8 * 4 * 48, 0)
    assert len(fleet.blocks()) <= blocks


@pytest.mark.parametrize("capacity", [10 * 1024 * BLOCK_BYTES, UNLIMITED])
def test_a_server_with_a_larger_capacity_leaves_others_of_its_model_theirs(
    store: FailingStore, capacity: int
) -> None:
    """As while one after the other is started again, or a snapshot is taken into the same url."""
    fleet = Fleet(store, 1, capacity_blocks=1024, blocks_a_second=60.0)
    fleet.run(60.0)
    (_, tier), least = fleet.servers[0], 1024
    assert tier.stats().blocks > 1000
    fleet.join(capacity=capacity)
    for _ in range(24):
        fleet.run(5.0)
        least = min(least, tier.stats().blocks)
    assert least > 1024 // 2
    before = fleet.stored
    fleet.fill(tier, 1)
    assert fleet.stored > before, "and it stores"


@pytest.mark.slow
def test_a_server_with_a_smaller_capacity_empties_nothing_and_stores(store: FailingStore) -> None:
    """One that comes to where the others' models have filled more than it may."""
    fleet = Fleet(store, 1, capacity_blocks=256, blocks_a_second=10.0)
    fleet.run(60.0)
    assert len(fleet.blocks()) == 256
    fleet.rate = 1.0
    for space in (NAMESPACE, Namespace(facts={"model": "b"}, group_bytes=NAMESPACE.group_bytes)):
        fleet.join(space, capacity=64 * BLOCK_BYTES)
    least = 256
    for _ in range(30):
        fleet.run(60.0)
        least = min(least, len(fleet.blocks()))
    assert 128 < least <= len(fleet.blocks()) <= 256
    assert all(tier.stats().blocks > 0 for _, tier in fleet.servers)
    fleet.servers.pop(0)[0].close()
    fleet.run(1500.0)
    assert 32 < len(fleet.blocks()) <= 64, "when the larger one has gone, its own counts"


def test_many_models_keep_what_there_is_room_for(store: FailingStore) -> None:
    """Each may hold a sixth, of which its servers claim a part ahead of need: one of the whole
    would be all that it has."""
    fleet = Fleet(store, 0, capacity_blocks=1200, blocks_a_second=4.0)
    for number in range(12):
        model = Namespace(facts={"model": str(number // 2)}, group_bytes=NAMESPACE.group_bytes)
        fleet.join(model)
    fleet.run(120.0)
    for keeper, tier in fleet.servers:
        assert tier.stats().blocks * BLOCK_BYTES > keeper.budget.cap / 2 > 0
    assert len(fleet.blocks()) <= 1200


def test_a_crash_makes_not_all_of_them_list_everything(store: FailingStore) -> None:
    fleet = begun(store)
    fleet.servers.pop()
    fleet.run(180.0)
    assert 1 <= store.requests["LIST everything"] <= 5
    names = [info.name for info in CountingStore.list(store, "claims/")]
    assert len(names) == SERVERS - 1, "the dead one's claim is gone"


def test_after_an_hour_away_not_all_list_everything_at_once(store: FailingStore) -> None:
    fleet = begun(store)
    store.away = True
    fleet.run(HOUR)
    assert store.in_vain <= SERVERS * 800, "one a look"
    store.away = False
    store.requests.clear()
    fleet.run(10.0)
    assert store.requests["LIST everything"] <= SERVERS // 2
    fleet.run(120.0)
    assert SERVERS <= store.requests["LIST everything"] <= SERVERS + 2
    for _, tier in fleet.servers:
        assert tier._budget.hold(1)[0] == 1, "all of them store again"


@pytest.mark.slow
@pytest.mark.parametrize("skews", [(0.0, 5 * HOUR), (-7 * HOUR, 0.0, 26 * HOUR)])
def test_clocks_that_are_hours_apart_cost_misses_and_no_budget(
    store: FailingStore, skews: tuple[float, ...]
) -> None:
    fleet = Fleet(store, 3, capacity_blocks=60, skews=skews, blocks_a_second=0.5)
    most = 0
    for _ in range(240):
        fleet.run(5.0)
        most = max(most, len(fleet.blocks()))
    assert 30 < most <= 60
    assert fleet.stored > 240, "room is made and used"
    fleet.rate = 0.0
    fleet.run(2.5 * HOUR)
    for _, tier in fleet.servers:
        tier.tick()
        assert set(tier.offered()) == fleet.blocks()
