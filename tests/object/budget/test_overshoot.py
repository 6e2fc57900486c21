"""How far a bucket's budget is exceeded by servers that store as fast as they can.

Keepers, tiers and caretakers are real; time only pretends to pass, so that every run is the same.
A block has 256 MiB, so that 1 TiB has 4,096 of them.
"""

from __future__ import annotations

import pytest
from support.object.simulated_fleet import CountingStore, Fleet

from kvtier.backends.object.lease import LEASE_S
from kvtier.record.record import HEADER_BYTES
from kvtier.types import Namespace

TIB = 1 << 40
BLOCK = 256 << 20
MODEL = Namespace(facts={"model": "large"}, group_bytes=(BLOCK - HEADER_BYTES,))
SERVERS = 16
RATE = 4.0
"""Blocks a second and server: 1 GiB."""


def fleet(servers: int = SERVERS, *, rate: float = RATE, seed: int = 1) -> Fleet:
    return Fleet(
        CountingStore(BLOCK),
        servers,
        blocks_a_second=rate,
        capacity_blocks=TIB // BLOCK,
        namespace=MODEL,
        seed=seed,
    )


def filled() -> Fleet:
    """A fleet whose bucket is nearly full."""
    found = fleet()
    while found.store.there < 0.9 * TIB:
        found.run(5.0)
    return found


@pytest.mark.slow
def test_sixteen_servers_as_fast_as_they_can() -> None:
    found = filled()
    most = found.run(60.0)
    print(f"peak: {most / TIB:.4f} of the capacity, {found.stored} blocks stored")
    assert most <= TIB
    assert found.store.there > 0.9 * TIB, "the room is used"
    before = found.stored
    found.run(30.0)
    assert (found.stored - before) * BLOCK > 10 << 30, "and is made anew"


@pytest.mark.slow
def test_the_caretaker_dies_and_others_with_it() -> None:
    found = filled()
    most = found.run(10.0)
    for _ in range(3):
        found.stop(found.caretaker())
        found.stop(next(at for at in range(SERVERS) if at not in found._asleep))
        most = max(most, found.run(25.0))
        before = found.stored
        most = max(most, found.run(75.0))
        assert found.stored > before, "another has taken over"
    print(f"peak: {most / TIB:.4f} of the capacity")
    assert most <= TIB
    [left] = {found.caretaker()}
    found.servers[left][0].refresh()
    assert found.servers[left][0].caretaker is not None
    assert found.servers[left][0].caretaker.report.bytes == found.store.there


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [20.0, 90.0])
def test_a_caretaker_that_was_asleep_deletes_nothing_wrongly(seconds: float) -> None:
    """It wakes with evictions still to be done; what others have stored since stays."""
    found = filled()
    found.run(10.0)
    sleeper = found.caretaker()
    found.stop(sleeper, seconds)
    most = found.run(seconds)
    keeper, _ = found.servers[sleeper]
    there = found.blocks()
    keeper.run_once()  # wakes, alone among them all
    gone = there - found.blocks()
    if seconds > 1.5 * LEASE_S:
        assert keeper.caretaker is None, "somebody else has its place"
        assert gone == set()
    most = max(most, found.run(30.0))
    print(f"peak: {most / TIB:.4f} of the capacity")
    assert most <= TIB
    assert found.caretaker() >= 0, "there is one, and only one"
    # what any server offers is there, but for what it has not heard of yet
    rate, found.rate = found.rate, 0.0
    found.run(10.0)
    for keeper, tier in found.servers:
        while keeper.updates:
            tier.tick()
        assert set(tier.offered()) <= found.blocks()
    assert rate


@pytest.mark.slow
def test_a_server_that_comes_back_after_its_lease_stores_nothing_until_it_is_known() -> None:
    found = filled()
    caretaker = found.caretaker()
    sleeper = next(at for at in range(SERVERS) if at != caretaker)
    found.stop(sleeper, 120.0)
    most = found.run(120.0)
    keeper, tier = found.servers[sleeper]
    assert keeper.budget.room == 0
    before = found.stored
    found.fill(tier, 4)
    assert found.stored == before
    stored = tier.stats().stored
    most = max(most, found.run(60.0))
    print(f"peak: {most / TIB:.4f} of the capacity")
    assert most <= TIB
    assert tier.stats().stored > stored
