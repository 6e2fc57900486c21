"""How fast the engine computes is read off its steps, also where one is scheduled ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.engine import HOST
from engines.world import World, prompt


def test_a_step_that_computes_a_prompt_ends_with_itself(
    world: World, model: Callable[..., Path]
) -> None:
    """Not with one without tokens that was scheduled before it: it would seem to have taken no
    time, and computing to be cheaper than any load."""
    stack = world.stack() | {"load_policy": "cost_model"}
    paced: dict[str, Any] = {"host": HOST.with_name("paced.py")}
    with world.engine(model("llama"), stack=stack, **paced) as engine:
        engine.generate(prompts=[prompt(41, 1100)], tokens=1)
        assert engine.overlap(prompt=prompt(42, 1100)) == [[], [1100]]


def test_an_engine_that_waits_for_a_load_does_not_spin(
    world: World, model: Callable[..., Path]
) -> None:
    """Within its caller's process it would take the GIL from the threads that load."""
    paced: dict[str, Any] = {"host": HOST.with_name("paced.py")}
    stack = world.stack(load_deadline="10min") | {"mover": {"mode": "threads"}}
    with world.engine(model("llama"), stack=stack, **paced) as engine:
        (reference,) = engine.generate(prompts=[prompt(43, 1100)])
        engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.hold_reads()
        engine.begin(prompt=prompt(43, 1100), tokens=16)
        engine.count_pauses()
        assert engine.pauses(steps=5) == 5
        engine.let_reads_go()
        found = engine.end()
        assert (found["tokens"], found["cached"]) == (reference["tokens"], 1024)
        engine.settle()
        before = engine.pauses()
        engine.generate(prompts=[prompt(43, 1100)])
        assert engine.pauses() == before, "all is in the engine's own cache"


def test_a_storm_on_an_engine_that_schedules_ahead(
    world: World, model: Callable[..., Path]
) -> None:
    """Right tokens though each step is decided on before the last one is known, and nothing is left
    over. What others must answer it says itself, before it is asked for anything twice."""
    few = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "max_model_len": 2048}
    ahead: dict[str, Any] = {"host": HOST.with_name("ahead.py"), "num_gpu_blocks_override": 44}
    prompts = [prompt(each % 5, 1100)[: 300 + 20 * each] for each in range(40)]
    with world.engine(model("llama"), **few) as plain:
        reference = [each["tokens"] for each in plain.generate(prompts=prompts, tokens=48)]
    with world.engine(
        model("llama"), stack=world.stack(capacity="24MiB"), **few, **ahead
    ) as engine:
        assert engine.is_ahead()
        free = engine.facts()["free_blocks"]
        found = engine.storm(
            prompts=prompts, tokens=48, seed=1, abort=0.03, forget=0.01, reset_at=20
        )
        assert found["preempted"] > 0
        assert found["cached"] > 0
        for at, tokens in found["outputs"].items():
            assert tokens == reference[int(at)]
        assert engine.forget_engine_cache()
        facts = engine.facts()
    assert (facts["pending"], facts["requests"], facts["busy"], facts["mistakes"]) == (
        0,
        0,
        False,
        0,
    )
    assert [(tier["pinned"], tier["in_flight"]) for tier in facts["chain"]["tiers"]] == [(0, 0)] * 2
    assert facts["free_blocks"] == free
