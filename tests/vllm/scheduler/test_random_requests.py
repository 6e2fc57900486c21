"""Requests at random in a KV cache that is too small for them: right tokens, and no leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.world import World, prompt

TOKENS = 48
SMALL = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
}
GROWTH_MAX = 12 << 20
# Compiled products of matrices are kept for each shape that a step has had: tens of MiB a round,
# with kvtier or without, and so different each time that a leak could hide behind them.
FORGETFUL = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}


def shared_prefixes(seed: int, count: int) -> list[list[int]]:
    """Prompts that begin alike, in a few families."""
    rng = random.Random(seed)
    bases = [prompt(1000 + each, 1400) for each in range(5)]
    return [
        rng.choice(bases)[: rng.randrange(100, 1400)]
        + rng.choices(range(256), k=rng.randrange(300))
        for _ in range(count)
    ]


def check_outputs(found: dict[str, Any], reference: list[list[int]]) -> None:
    wrong = [at for at, tokens in found["outputs"].items() if tokens != reference[int(at)]]
    assert not wrong
    assert len(found["outputs"]) + len(found["aborted"]) == len(reference)


def check_nothing_held(facts: dict[str, Any]) -> None:
    assert (facts["pending"], facts["requests"], facts["busy"]) == (0, 0, False)
    assert facts["mistakes"] == 0
    for tier in facts["chain"]["tiers"]:
        assert (tier["pinned"], tier["in_flight"]) == (0, 0), tier["medium"]
    assert facts["chain"]["mover"]["in_flight_blocks"] == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_storm_of_loads_that_are_given_up(
    world: World, model: Callable[..., Path], family: str
) -> None:
    """At random, and more often than an engine does: while others join them, are preempted or
    aborted, and while the caches are emptied."""
    folder = model(family)
    prompts = shared_prefixes(3, 80)
    small = SMALL | {"num_gpu_blocks_override": 44}
    with world.engine(folder, **small) as plain:
        found = plain.storm(prompts=prompts, tokens=4, seed=3)
        reference = [found["outputs"][str(at)] for at in range(len(prompts))]
    stack = world.stack(capacity="12MiB") | {"mover": {"mode": "threads"}}
    with world.engine(folder, stack=stack, **small) as engine:
        empty = engine.facts()
        engine.give_up_loads(seed=3, chance=0.3, pause=0.2)
        found = engine.storm(
            prompts=prompts,
            tokens=4,
            seed=3,
            running=4,
            abort=0.01,
            forget=0.5,
            reset_at=20,
            preempt_at=50,
        )
        check_outputs(found, reference)
        assert engine.forget_engine_cache()
        facts = engine.facts()
        check_nothing_held(facts)
        assert facts["free_blocks"] == empty["free_blocks"]
        assert facts["late_loads"] > 0


@pytest.mark.parametrize(
    ("family", "count", "blocks", "memory", "policy"),
    [("llama", 100, 44, "24MiB", "fcfs"), ("gemma3", 50, 30, "8MiB", "priority")],
)
def test_storm(
    world: World,
    model: Callable[..., Path],
    family: str,
    count: int,
    blocks: int,
    memory: str,
    policy: str,
) -> None:
    """Twice over: the second round must not hold more than the first, nor cost more memory than
    it costs the engine alone. In the midst of the first, all tiers are emptied.
    In both, all that runs is preempted once, and may load again at once.
    The memory holds a part of what is stored, so the NVMe tier must serve the rest."""
    folder = model(family)
    rounds = [shared_prefixes(seed, count) for seed in (1, 2)]
    small = {**SMALL, "num_gpu_blocks_override": blocks, "scheduling_policy": policy}
    small["environment"] = FORGETFUL
    with world.engine(folder, **small) as plain:
        reference, grown = [], []
        for seed, prompts in enumerate(rounds):
            found = plain.storm(prompts=prompts, tokens=TOKENS, seed=seed)
            reference.append([found["outputs"][str(at)] for at in range(count)])
            grown.append(plain.resident())

    engine = world.engine(folder, stack=world.stack(capacity=memory), **small)
    empty = engine.facts()
    after = []
    preempted = cached = 0
    for seed, prompts in enumerate(rounds):
        found = engine.storm(
            prompts=prompts,
            tokens=TOKENS,
            seed=seed,
            abort=0.03,
            forget=0.01,
            reset_at=-1 if seed else count // 2,
            preempt_at=count // 3,
            priorities=policy == "priority",
        )
        check_outputs(found, reference[seed])
        preempted += found["preempted"]
        cached += found["cached"]
        assert engine.forget_engine_cache()
        facts = engine.facts()
        check_nothing_held(facts)
        assert facts["free_blocks"] == empty["free_blocks"]
        after.append(facts | {"resident": engine.resident()})
    assert preempted > 0
    assert cached > 0
    assert after[1]["chain"]["hits"][1] > 0, "the NVMe tier has served, too"
    assert after[1]["descriptors"] <= after[0]["descriptors"]
    growth = after[1]["resident"] - after[0]["resident"]
    assert growth < grown[1] - grown[0] + GROWTH_MAX
