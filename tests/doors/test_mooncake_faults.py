"""Owners, masters and clients of a pool die, stall and fill it up: right bytes or a miss, and it
recovers."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes.mooncake_pool import MooncakePool, StallingProxy, until
from support.processes.mooncake_server import NEW, MooncakeServer, Writer
from support.tiers.subjects import capacity

from kvtier.backends.mooncake import client
from kvtier.backends.mooncake.client import MooncakeSettings, Pool
from kvtier.system.memory import address_of
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey, Outcome

POOL = 1
DEATHS = int(os.environ.get("DEATHS", "25"))
"""Each fifth is the master's, the others an owner's. What docs say of 100 was measured so."""
RECOVERS_S = 120.0


class Held(NamedTuple):
    """What a process has of its machine."""

    threads: int
    files: int
    kilobytes: int

    @classmethod
    def of(cls, process: Path) -> Held:
        said = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        memory = int(said["RssAnon"].split()[0])
        return cls(int(said["Threads"]), len(list((process / "fd").iterdir())), memory)


@pytest.fixture
def server(pool: MooncakePool, tmp_path: Path) -> Iterator[Callable[..., MooncakeServer]]:
    """Opens one of which other tests' find nothing."""
    servers: list[MooncakeServer] = []

    def start(name: str, master: str = pool.address, **more: str) -> MooncakeServer:
        servers.append(MooncakeServer(name, master, tmp_path.name, **more))
        return servers[-1]

    yield start
    for each in servers:
        each.close()


def test_what_one_stores_another_finds(server: Callable[..., MooncakeServer]) -> None:
    a, b = server("a"), server("b")
    keys = make_keys(40)
    a.store(keys)
    assert b.chain.tiers[POOL].stats().blocks == 0, "it has not been told of any"
    assert b.load(keys) == keys
    assert b.load(make_keys(10, start=50)) == []


def test_an_owner_dies_amid_loads(
    pool: MooncakePool, server: Callable[..., MooncakeServer]
) -> None:
    a, b = server("a"), server("b")
    keys = make_keys(100)
    a.store(keys)
    assert b.load(keys[:4]) == keys[:4]
    killer = threading.Timer(0.02, pool.kill_owner)
    killer.start()
    b.load(keys)
    killer.join()
    assert b.load(keys) == []
    pool.start_owner()
    until(lambda: a.gives(b), RECOVERS_S)


def test_the_master_dies_and_another_takes_its_place(
    pool: MooncakePool, server: Callable[..., MooncakeServer]
) -> None:
    a, b = server("a"), server("b")
    keys = make_keys(20)
    a.store(keys)
    assert b.load(keys) == keys
    pool.kill_master()
    assert b.load(keys) == []
    a.store(make_keys(20, start=100))
    pool.restart_master()
    until(lambda: a.gives(b), RECOVERS_S)
    assert b.load(keys) == [], "the new one knows nothing of old values"


def test_nothing_is_asked_while_the_master_stalls(
    pool: MooncakePool, server: Callable[..., MooncakeServer]
) -> None:
    proxy = StallingProxy(pool.address)
    a, b = server("a"), server("b", proxy.address)
    keys = make_keys(20)
    a.store(keys)
    assert b.load(keys[:10]) == keys[:10]
    proxy.stall()
    assert b.load(keys[10:]) == []
    assert b.chain.find(keys[10:]).answered, "one call that does not answer is enough"
    assert b.load(keys) == []
    assert b.stack.stats().down[POOL]
    proxy.flow()
    until(lambda: b.load(keys) == keys, RECOVERS_S)
    proxy.close()


def test_a_full_pool_drops_and_serves(tmp_path: Path) -> None:
    pool = MooncakePool(tmp_path, lent=16 << 20)
    a = MooncakeServer("a", pool.address, "full", cpu="128MiB")
    b = MooncakeServer("b", pool.address, "full")
    keys = make_keys(300)
    a.store(keys)
    assert 0 < len(b.load(keys)) < len(keys)
    until(lambda: a.gives(b, blocks=1), RECOVERS_S)  # it evicts a twentieth at a time
    for each in (a, b, pool):
        each.close()


def test_clients_that_lend_die_while_they_store_and_come_back(
    pool: MooncakePool, server: Callable[..., MooncakeServer], tmp_path: Path
) -> None:
    """What lies in their own memory is gone, also for those that follow; what lies elsewhere is
    not, and nothing is served that was written in part."""
    dice, other, keys = random.Random(7), server("other"), list[BlockKey]()
    for life in range(5):
        writer = Writer(pool.address, tmp_path.name, start=1000 * life)
        keys += writer.killed_after(batches=dice.randint(2, 6))
        other.load(keys)
    back = server("writer")
    left = back.load(keys)
    assert 0 < len(left) < len(keys)
    assert back.load(left) == left
    assert other.load(left) == left
    until(lambda: back.gives(other), RECOVERS_S)


def test_a_client_that_moves_nothing_any_more_is_replaced(
    pool: MooncakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that remembers an address of a machine that is gone fails for ever: seen once in fifty
    deaths."""
    monkeypatch.setattr(client, "REOPEN_S", 0.0)
    memory = memoryview(mmap.mmap(-1, 4096))
    own = Pool(MooncakeSettings(master=pool.address, prefix="moved", capacity=capacity(1 << 20)))

    def put(name: str) -> Outcome:
        (outcome,) = own.put([f"moved/{name}"], [address_of(memory)], [4096], replace=False)
        return outcome

    own.register(address_of(memory), 4096)
    assert put("first") is Outcome.OK
    before = own.open()
    pool.kill_owner()
    until(lambda: put("second") is Outcome.NO_SPACE and own.open() is not before)
    pool.start_owner()
    until(lambda: put("third") is Outcome.OK, RECOVERS_S)
    own.close()


def test_many_deaths_leave_nothing_behind(
    pool: MooncakePool, server: Callable[..., MooncakeServer], figure: Callable[[str], None]
) -> None:
    """In the process of the mover, which has lived through all of them."""
    a, b = server("a"), server("b")
    process, held = b.mover, list[Held]()
    for death in range(1, DEATHS + 1):
        keys = make_keys(8, start=next(NEW))
        a.store(keys)
        b.load(keys[:4])
        if death % 5:
            pool.kill_owner()
            b.load(keys)
            pool.start_owner()
        else:
            pool.kill_master()
            b.load(keys)
            pool.restart_master()
            until(lambda: a.gives(b), RECOVERS_S)
        held.append(Held.of(process))
    until(lambda: a.gives(b), RECOVERS_S)
    assert b.mover == process
    early, late = held[len(held) // 3], held[-1]
    figure(f"mooncake: after {len(held) // 3 + 1} deaths {early}, after {DEATHS} {late}")
    assert late.threads <= early.threads + 2, held
    assert late.files <= early.files + 8, held
    assert late.kilobytes < 1.1 * early.kilobytes + (8 << 10), held
