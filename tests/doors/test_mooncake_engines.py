"""vLLM engines with stacks of their own and no disk share what each has computed, by a pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engines.answers import check, hand_over
from engines.engine import HOST, Engine
from engines.world import World, prompt
from support.processes.mooncake_pool import MooncakePool, StallingProxy, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM
CHUNK, HIT = 256, 512
PROMPTS = [*(prompt(seed, 600) for seed in range(30, 53)), prompt(53, 3900), prompt(54, 3900)]
LONG = (23, 24)
"""Of 15 blocks each, of which a small pool has room for 16."""
RECOVERS_S = 120.0


class Fleet:
    """Two engines, which share nothing but the pool; the second reaches its master by a proxy."""

    def __init__(self, world: World, model: Path, pool: MooncakePool) -> None:
        self._world, self._model, self.pool = world, model, pool
        self.proxy = StallingProxy(pool.address)
        with world.engine(model, host=HOST.with_name("scored.py")) as plain:
            self.expected = [plain.weigh(prompt=each) for each in PROMPTS]
        self.a, self.b = self.engine("a"), self.engine("b", self.proxy.address)
        self._unused = count()

    def engine(self, name: str, master: str | None = None, **more: Any) -> Engine:
        region = self._world.region / name
        region.mkdir(mode=0o700)
        pool = {"kind": "mooncake", "master": master or self.pool.address, "capacity": "1GiB"}
        cpu = {"kind": "cpu", "path": str(region), "capacity": "64MiB"}
        patient = {"load_deadline": "60s"}  # processors may be busy
        stack = {
            "version": 1,
            "name": name,
            "load_policy": "always",
            "across_degrees": True,
            "tiers": [cpu | patient, pool | patient | {"call_deadline": "3s"}],
        }
        engine = self._world.engine(self._model, stack=stack, **more)
        engine.wait_for_others(patience=1e9)
        return engine

    def unseen(self, prompts: int) -> list[int]:
        """The numbers of prompts that nobody has computed."""
        return [next(self._unused) for _ in range(prompts)]

    def ask(self, engine: Engine, number: int) -> int:
        """What it answers is right; how many tokens of the prompt it found, of which it keeps
        nothing itself."""
        engine.forget_engine_cache()
        engine.clear(tier=0)
        (found,) = engine.generate(prompts=[PROMPTS[number]])
        check([found], [self.expected[number]], [found["cached"]])
        engine.settle()
        cached: int = found["cached"]
        return cached

    def gives(self, number: int) -> bool:
        """Whether one finds now what the other computes: both had it, perhaps, and lost it."""
        self.ask(self.a, number)
        return self.ask(self.b, number) == HIT

    def shared(self, prompts: int) -> list[int]:
        """The numbers of prompts that both know to be in the pool."""
        numbers = self.unseen(prompts)
        for number in numbers:
            until(lambda number=number: self.gives(number), RECOVERS_S)  # type: ignore[misc]
        return numbers

    def break_amid_a_load(self, how: Callable[[], object]) -> int:
        """What is answered is right; the number of another prompt that both knew to be there."""
        first, other = self.shared(2)
        self.b.forget_engine_cache()
        self.b.clear(tier=0)
        self.b.begin(prompt=PROMPTS[first], tokens=16)
        how()
        answered = self.b.end()
        check([answered], [self.expected[first]], [answered["cached"]])
        return other

    def make_no_mistakes(self) -> None:
        for engine in (self.a, self.b):
            engine.settle()
            facts = engine.facts()
            assert (facts["mistakes"], facts["pending"], facts["requests"]) == (0, 0, 0)


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, model: Callable[..., Path], pool: MooncakePool
) -> Iterator[Fleet]:
    """For all tests: who breaks the pool mends it."""
    pytest.importorskip("vllm")
    world = World(tmp_path_factory.mktemp("fleet"))
    fleet = Fleet(world, model("llama"), pool)
    yield fleet
    fleet.proxy.close()
    world.close()


def test_what_one_engine_has_computed_another_finds(fleet: Fleet) -> None:
    """At its first question, though nobody has told it: the pool is asked when a request comes."""
    a, b, numbers = fleet.a, fleet.b, fleet.unseen(3)
    assert [fleet.ask(a, number) for number in numbers] == [0] * 3
    assert [fleet.ask(b, number) for number in numbers] == [HIT] * 3
    assert b.facts()["chain"]["hits"][1] == 3 * HIT // CHUNK
    b.forget_engine_cache()
    b.clear(tier=0)
    together = b.generate(prompts=[PROMPTS[number] for number in numbers])
    check(together, [fleet.expected[number] for number in numbers], [HIT] * 3)
    fleet.make_no_mistakes()


def test_prompts_are_handed_over_to_an_engine_of_any_size(fleet: Fleet) -> None:
    """Asked for before it has come to the pool, it is asked for again until it has."""
    two = fleet.engine("two", tensor_parallel_size=2)
    for computes, answers in ((fleet.a, fleet.b), (two, fleet.b), (fleet.a, two)):
        before = answers.facts()["chain"]["hits"][1]
        for number in fleet.unseen(2):
            answered = hand_over(computes, answers, PROMPTS[number])
            check([answered], [fleet.expected[number]], [HIT])
        facts = answers.facts()
        assert facts["chain"]["hits"][1] - before == 2 * HIT // CHUNK
        assert (facts["failed_loads"], facts["late_loads"], facts["mistakes"]) == (0, 0, 0)
    two.kill()
    fleet.make_no_mistakes()


def test_an_owner_is_killed_amid_a_load(fleet: Fleet) -> None:
    other = fleet.break_amid_a_load(fleet.pool.kill_owner)
    assert fleet.ask(fleet.b, other) == 0
    fleet.pool.start_owner()
    fleet.shared(1)
    fleet.make_no_mistakes()


def test_the_master_is_killed_while_engines_serve(fleet: Fleet) -> None:
    other = fleet.break_amid_a_load(fleet.pool.kill_master)
    assert [fleet.ask(engine, other) for engine in (fleet.a, fleet.b)] == [0, 0]
    fleet.pool.restart_master()
    fleet.shared(1)
    fleet.make_no_mistakes()


def test_the_way_to_the_master_stalls(fleet: Fleet) -> None:
    numbers = fleet.unseen(2)
    for number in numbers:
        fleet.ask(fleet.a, number)
    fleet.proxy.stall()
    assert [fleet.ask(fleet.b, number) for number in numbers] == [0, 0]
    fleet.proxy.flow()
    fleet.shared(1)
    fleet.make_no_mistakes()


def test_the_pool_is_full(fleet: Fleet) -> None:
    """What it has no room for is computed; and it makes room for what comes later."""
    fleet.pool.kill_owner()
    fleet.pool.start_owner(lent=16 << 20)
    for number in LONG:
        fleet.ask(fleet.a, number)
    assert sum(fleet.ask(fleet.b, number) for number in LONG) < 30 * CHUNK
    fleet.shared(1)
    fleet.pool.kill_owner()
    fleet.pool.start_owner()
    fleet.shared(1)
    fleet.make_no_mistakes()


def test_an_owner_stands_still(fleet: Fleet) -> None:
    """The load of the first is given up; then the pool is left alone for a while."""
    numbers = fleet.shared(2)
    os.kill(fleet.pool.owner.pid, signal.SIGSTOP)
    assert [fleet.ask(fleet.b, number) for number in numbers] == [0, 0]
    os.kill(fleet.pool.owner.pid, signal.SIGCONT)
    fleet.shared(1)
    fleet.make_no_mistakes()
