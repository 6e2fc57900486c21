"""What servers on one bucket ask of it: requests are paid for. Time only pretends to pass."""

from __future__ import annotations

from collections import Counter

import pytest
from support.object.simulated_fleet import CountingStore, Fleet

from kvtier.types import BlockKey, Presence

REFRESH_S = 5.0
IDLE = {"PUT": 181, "LIST": 1640, "GET": 0}
"""An hour and server: what it was when each server kept the budget for itself."""


def requests(fleet: Fleet, seconds: float) -> Counter[str]:
    """An hour and server, by kind; those of blocks are not counted."""
    fleet.store.requests.clear()
    fleet.run(seconds)
    found: Counter[str] = Counter()
    for what, count in fleet.store.requests.items():
        kind, _, of = what.partition(" ")
        if of != "blocks":
            found[kind] += count
    return Counter(
        {kind: round(n * 3600 / seconds / len(fleet.servers)) for kind, n in found.items()}
    )


@pytest.mark.parametrize("servers", [1, 8])
def test_an_idle_server(servers: int) -> None:
    fleet = Fleet(CountingStore(), servers)
    fleet.run(120.0)
    found = requests(fleet, 900.0)
    print(f"{servers} idle: {dict(found)} an hour and server")
    for kind, most in IDLE.items():
        assert found[kind] <= most
    assert found["DELETE"] == 0


@pytest.mark.slow
def test_what_a_server_reads_does_not_grow_with_the_number_of_servers() -> None:
    """A report and a manifest each round; and the caretaker reads one manifest of each server."""
    found = {}
    for servers in (3, 12):
        fleet = Fleet(CountingStore(), servers, blocks_a_second=1.0)
        fleet.run(120.0)
        found[servers] = requests(fleet, 240.0)
        print(f"{servers} that store: {dict(found[servers])} an hour and server")
    for each in found.values():
        assert each["GET"] <= 3.2 * 3600 / REFRESH_S
    assert found[12]["LIST"] <= IDLE["LIST"]
    assert found[12]["PUT"] <= found[3]["PUT"]


def test_a_new_block_is_known_to_all_after_three_rounds() -> None:
    """Its own server knows it at once."""
    fleet = Fleet(CountingStore(), 5)
    fleet.run(30.0)
    for teller in range(5):
        _, tier = fleet.servers[teller]
        before = set(tier.offered())
        fleet.fill(tier, 3)
        new = [key for key, _ in set(tier.offered()) - before]
        assert hits(fleet, teller, new) == 3
        fleet.run(3 * REFRESH_S + 1.0)
        assert [hits(fleet, at, new) for at in range(5)] == [3] * 5


def hits(fleet: Fleet, at: int, keys: list[BlockKey]) -> int:
    return fleet.servers[at][1].lookup(keys).count(Presence.HIT)


def test_a_block_is_known_though_the_caretaker_dies_before_it_relays_it() -> None:
    fleet = Fleet(CountingStore(), 4)
    fleet.run(30.0)
    dead = fleet.caretaker()
    fleet.stop(dead)
    alive = [at for at in range(4) if at != dead]
    _, tier = fleet.servers[alive[0]]
    fleet.fill(tier, 3)
    new = [key for key, _ in tier.offered()]
    fleet.run(120.0)
    assert [hits(fleet, at, new) for at in alive] == [3] * 3
