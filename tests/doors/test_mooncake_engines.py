"""vLLM engines with stacks of their own and no disk share what each has computed, by a pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.engine import Engine
from engines.world import World, prompt
from support.processes.mooncake_pool import MooncakePool, StallingProxy, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM
CHUNK, HIT = 256, 1024
PROMPTS = [prompt(seed, 1100) for seed in range(30, 42)]
RECOVERS_S = 120.0
COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False}


class Pair:
    """Two engines, which share nothing but the pool."""

    def __init__(self, world: World, folder: Path, first: str, second: str) -> None:
        plain = world.engine(folder, enable_prefix_caching=False)
        self.reference = [each["tokens"] for each in plain.generate(prompts=PROMPTS)]
        plain.kill()
        self.a = world.engine(folder, stack=stack(world, "a", first))
        self.b = world.engine(folder, stack=stack(world, "b", second))
        for engine in (self.a, self.b):
            engine.wait_for_others(patience=5.0)  # on busy processors

    def ask(self, engine: Engine, number: int) -> int:
        """What it answers is right; how many tokens of the prompt it found."""
        (found,) = engine.generate(prompts=[PROMPTS[number]])
        assert found["tokens"] == self.reference[number]
        engine.settle()
        engine.forget_engine_cache()
        cached: int = found["cached"]
        return cached

    def ask_pool(self, engine: Engine, number: int) -> int:
        """The same without what is in the engine's CPU memory."""
        engine.clear(tier=0)
        return self.ask(engine, number)

    def gives(self, number: int) -> bool:
        """Whether one finds now what the other computes: both had it, perhaps, and lost it."""
        self.ask_pool(self.a, number)
        return self.ask_pool(self.b, number) == HIT


def stack(world: World, name: str, master: str) -> dict[str, Any]:
    region = world.region / name
    region.mkdir(mode=0o700)
    return {
        "version": 1,
        "name": name,
        "load_policy": "always",
        "tiers": [
            {"kind": "cpu", "path": str(region), "capacity": "64MiB"},
            {"kind": "mooncake", "master": master, "capacity": "1GiB"},
        ],
    }


def no_mistakes(*engines: Engine) -> None:
    for engine in engines:
        engine.settle()
        facts = engine.facts()
        assert (facts["mistakes"], facts["pending"], facts["requests"]) == (0, 0, 0)


@pytest.fixture
def proxy(pool: MooncakePool) -> Iterator[StallingProxy]:
    proxy = StallingProxy(pool.address)
    yield proxy
    proxy.close()


@pytest.fixture
def pair(
    world: World, model: Callable[..., Path], pool: MooncakePool, proxy: StallingProxy
) -> Pair:
    pytest.importorskip("vllm")
    return Pair(world, model("llama"), pool.address, proxy.address)


def test_what_one_engine_has_computed_another_finds(pair: Pair) -> None:
    """At its first question, though nobody has told it: the pool is asked when a request comes."""
    a, b = pair.a, pair.b
    assert [pair.ask(a, number) for number in range(6)] == [0] * 6
    assert [pair.ask(b, number) for number in range(6)] == [HIT] * 6
    assert b.facts()["chain"]["hits"][1] == 6 * HIT // CHUNK
    prompts = PROMPTS[:6]
    b.clear(tier=0)
    together = b.generate(prompts=prompts)
    assert [each["tokens"] for each in together] == pair.reference[:6]
    assert [each["cached"] for each in together] == [HIT] * 6
    no_mistakes(a, b)


def test_a_prompt_is_handed_over(pair: Pair) -> None:
    """Asked for before it has come to the pool, it is asked for again until it has."""
    a, b = pair.a, pair.b
    said = a.generate_with(prompt=PROMPTS[0], tokens=1, limits=COMPUTE)["transfer"]
    said.pop("remote_prefill_cached_tokens")
    b.wait_for_others(patience=1e9)
    b.begin(prompt=PROMPTS[0], tokens=16, limits=said)
    a.settle()
    answer = b.end()
    assert (answer["tokens"], answer["cached"]) == (pair.reference[0], HIT)
    no_mistakes(a, b)


def test_faults_of_the_pool_cost_hits_alone(
    pair: Pair, pool: MooncakePool, proxy: StallingProxy
) -> None:
    a, b = pair.a, pair.b
    for number in range(len(PROMPTS)):
        pair.ask(a, number)
    assert pair.ask(b, 0) == HIT

    b.begin(prompt=PROMPTS[1], tokens=16)
    pool.kill_owner()
    assert b.end()["tokens"] == pair.reference[1]
    for number in range(4):
        assert pair.ask_pool(b, number) <= HIT
    pool.start_owner()
    until(lambda: pair.gives(4), RECOVERS_S)

    b.clear(tier=0)
    b.begin(prompt=PROMPTS[4], tokens=16)
    pool.kill_master()
    assert b.end()["tokens"] == pair.reference[4]
    for engine in (a, b):
        for number in range(4, 8):
            pair.ask_pool(engine, number)
    pool.restart_master()
    until(lambda: pair.gives(8), RECOVERS_S)

    proxy.stall()
    for number in range(8, 12):
        assert pair.ask_pool(b, number) == 0
    proxy.flow()
    until(lambda: pair.gives(9), RECOVERS_S)

    os.kill(pool.owner.pid, signal.SIGSTOP)
    for number in range(8, 12):
        assert pair.ask_pool(b, number) == 0
    os.kill(pool.owner.pid, signal.SIGCONT)
    until(lambda: pair.gives(10), RECOVERS_S)
    no_mistakes(a, b)
