"""Owners and masters of a pool die, stall and fill up: right bytes or a miss, and it recovers."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes.mooncake_pool import MooncakePool, StallingProxy, until

from kvtier import Stack
from kvtier.move.process import ProcessMover
from kvtier.testing.subject import make_keys, make_memory_folder
from kvtier.types import BlockKey, Namespace

NAMESPACE = Namespace(facts={"model": "mooncake"}, group_bytes=(256 << 10,))
POOL = 1
DEATHS = 100
RECOVERS_S = 120.0
NEW = count(10_000, 1000)


def payload(key: BlockKey) -> bytes:
    return hashlib.shake_128(key).digest(NAMESPACE.payload_bytes)


class Server:
    """A stack with a mover in a process of its own, as when it serves; no disk."""

    def __init__(self, name: str, master: str, cpu: str = "32MiB") -> None:
        self.region = make_memory_folder()
        self.stack = Stack.open(
            {
                "version": 1,
                "name": name,
                "load_policy": "always",
                "tiers": [
                    {"kind": "cpu", "path": str(self.region), "capacity": cpu},
                    {"kind": "mooncake", "master": master, "capacity": "1GiB"},
                ],
            },
            NAMESPACE,
            serving=True,
        )
        self.chain = self.stack.chain

    @property
    def mover_process(self) -> Path:
        mover = self.stack.mover
        assert isinstance(mover, ProcessMover)
        assert mover.pid is not None
        return Path(f"/proc/{mover.pid}")

    def store(self, keys: Sequence[BlockKey]) -> None:
        """As far as there is room; whatever comes of it, nothing raises."""
        self.stack.store({key: payload(key) for key in keys})
        self.stack.settle()

    def load(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """What arrives, every byte of it right; of that, host memory keeps nothing."""
        self.chain.tiers[0].forget(keys)
        found = self.stack.load(keys)
        assert all(found[key] == payload(key) for key in found)
        return [key for key in keys if key in found]

    def gives(self, other: Server, blocks: int = 8) -> bool:
        """Whether another finds what is stored here now."""
        keys = make_keys(blocks, start=next(NEW))
        self.store(keys)
        return other.load(keys) == keys

    def close(self) -> None:
        self.stack.close()
        shutil.rmtree(self.region)


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
def server(pool: MooncakePool) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(name: str, master: str = pool.address, **more: str) -> Server:
        servers.append(Server(name, master, **more))
        return servers[-1]

    yield start
    for each in servers:
        each.close()


def test_what_one_stores_another_finds(server: Callable[..., Server]) -> None:
    a, b = server("a"), server("b")
    keys = make_keys(40)
    a.store(keys)
    assert b.chain.tiers[POOL].stats().blocks == 0, "it has not been told of any"
    assert b.load(keys) == keys
    assert b.load(make_keys(10, start=50)) == []


def test_an_owner_dies_amid_loads(pool: MooncakePool, server: Callable[..., Server]) -> None:
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
    pool: MooncakePool, server: Callable[..., Server]
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
    pool: MooncakePool, server: Callable[..., Server]
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
    a, b = Server("a", pool.address, cpu="128MiB"), Server("b", pool.address)
    keys = make_keys(300)
    a.store(keys)
    assert 0 < len(b.load(keys)) < len(keys)
    until(lambda: a.gives(b, blocks=1), RECOVERS_S)  # it evicts a twentieth at a time
    for each in (a, b, pool):
        each.close()


@pytest.mark.parametrize("what", ["owner", "master"])
def test_many_deaths_leave_nothing_behind(
    pool: MooncakePool, server: Callable[..., Server], what: str
) -> None:
    """In the process of the mover, which has lived through all of them."""
    a, b = server("a"), server("b")
    process, held = b.mover_process, []
    for _ in range(DEATHS if what == "owner" else DEATHS // 5):
        keys = make_keys(8, start=next(NEW))
        a.store(keys)
        b.load(keys[:4])
        if what == "owner":
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
    assert b.mover_process == process
    third = len(held) // 3
    assert held[-1].threads <= held[third].threads + 2, held
    assert held[-1].files <= held[third].files + 8, held
    assert held[-1].kilobytes < 1.1 * held[third].kilobytes + (8 << 10), held
