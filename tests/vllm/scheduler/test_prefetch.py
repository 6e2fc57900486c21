"""What comes into CPU memory before it is asked for: while requests wait, and after a restart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import Engine, connector
from engines.world import World, prompt

PROMPTS = [prompt(500 + seed, 1100) for seed in range(5)]
CHUNKS = 1024 // 256
BUSY = prompt(499, 100)


@pytest.fixture(scope="module")
def reference(plain_llama: Engine) -> list[list[int]]:
    return [each["tokens"] for each in plain_llama.generate(prompts=PROMPTS)]


def check_quiet(engine: Engine) -> dict[str, Any]:
    """Nothing is left under way; what the chain has counted of prefetches."""
    assert engine.settle()
    facts = engine.facts()
    assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (0, 0, 0)
    assert (facts["pending"], facts["requests"], facts["busy"]) == (0, 0, False)
    assert [tier["pinned"] for tier in facts["chain"]["tiers"]] == [0, 0]
    assert [tier["in_flight"] for tier in facts["chain"]["tiers"]] == [0, 0]
    found: dict[str, Any] = facts["chain"]["prefetch"]
    return found


def behind_another(engine: Engine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers to prompts that wait until another request has ended, in the order of their ends."""
    engine.begin(prompt=BUSY, tokens=24, steps=2)
    for each in prompts:
        engine.begin(prompt=each, tokens=16, steps=0)
    first, *found = [engine.end() for _ in range(len(prompts) + 1)]
    assert len(first["tokens"]) == 24
    return found


@pytest.mark.parametrize("below", [False, True], ids=["alone", "below another"])
def test_what_waits_is_prefetched(
    world: World, model: Callable[..., Path], reference: list[list[int]], below: bool
) -> None:
    """Also below a MultiConnector, with what is served last aborted in the queue."""
    ahead = {"warmup_share": 0, "memory": 0.75}
    transfer = connector(world.stack() | {"mover": {"mode": "threads"}, "prefetch": ahead})
    if below:
        inner = {"connectors": [transfer]}
        transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = inner
    options = {"max_num_seqs": 1, "transfer": transfer}
    with world.engine(model("llama"), **options) as engine:
        assert [each["tokens"] for each in engine.generate(prompts=PROMPTS)] == reference
        engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.slow_reads(pause=0.01)
        found = behind_another(engine, PROMPTS)
        assert sorted(each["tokens"] for each in found) == sorted(reference)
        assert [each["cached"] for each in found] == [1024] * len(PROMPTS)
        counted = check_quiet(engine)
        assert counted["arrived"] == counted["used"] == [0, CHUNKS * len(PROMPTS)]
        assert counted["saved_seconds"] > 0

        engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.begin(prompt=BUSY, tokens=24, steps=2)
        engine.begin(prompt=PROMPTS[0], tokens=16, steps=3)
        engine.abort()
        engine.end()
        counted = check_quiet(engine)
        assert counted["wasted"][1] + counted["cancelled"][1] > 0
        assert engine.facts()["chain"]["tiers"][0]["blocks"] == 0, "of its prompt nothing is left"


@pytest.mark.parametrize("served", [False, True], ids=["never served", "served too"])
def test_a_storm_of_requests_that_are_aborted_leaves_nothing_behind(
    world: World, model: Callable[..., Path], reference: list[list[int]], served: bool
) -> None:
    """Each names another prefix on the disk. Where the honest ones load nothing and come before
    them, they never begin; else many of them begin to load, or to be computed."""
    hostile = [prompt(2000 + seed, 300) for seed in range(40)]
    stack = world.stack(capacity="32MiB") | {"mover": {"mode": "threads"}}
    stack["prefetch"] = {"warmup_share": 0, "memory": 0.5}
    with world.engine(
        model("llama"), stack=stack, max_num_seqs=1, scheduling_policy="priority"
    ) as engine:
        for first in range(0, len(hostile), 8):
            engine.generate(prompts=hostile[first : first + 8], tokens=1)
            assert engine.settle()
        if served:
            assert [each["tokens"] for each in engine.generate(prompts=PROMPTS)] == reference
        assert engine.forget_engine_cache()
        engine.clear(tier=0)
        assert engine.settle()
        before = engine.facts()
        engine.slow_reads(pause=0.005)
        found = engine.besieged(
            honest=PROMPTS, hostile=hostile, tokens=16, life=6, priority=int(not served)
        )
        assert found["answers"] == reference
        assert found["hostile"] > len(hostile)
        assert (found["served"] > 0) == served
        counted = check_quiet(engine)
        assert counted["arrived"][1] + counted["cancelled"][1] > counted["used"][1]
        after = engine.facts()
        host, then = (each["chain"]["tiers"][0] for each in (after, before))
        assert host["free"] + host["blocks"] == then["free"] + then["blocks"]
        if not served:
            assert host["blocks"] == CHUNKS * len(PROMPTS), "of the hostile ones nothing is left"
        assert engine.forget_engine_cache()
        assert engine.facts()["free_blocks"] == before["free_blocks"]


def test_an_engine_that_starts_has_the_hottest_blocks_at_hand(
    world: World, model: Callable[..., Path], reference: list[list[int]]
) -> None:
    with world.engine(model("llama"), stack=world.stack()) as engine:
        engine.generate(prompts=PROMPTS)
        engine.settle()
        engine.kill()
    for left in world.region.iterdir():
        shutil.rmtree(left)
    stack = world.stack() | {"prefetch": {"warmup_share": 0.75}}
    with world.engine(model("llama"), stack=stack) as engine:
        counted = check_quiet(engine)
        assert counted["warmed"] == [0, CHUNKS * len(PROMPTS)]
        found = engine.generate(prompts=PROMPTS)
        assert [each["tokens"] for each in found] == reference
        assert [each["cached"] for each in found] == [1024] * len(PROMPTS)
        assert engine.facts()["chain"]["hits"] == [CHUNKS * len(PROMPTS), 0]
