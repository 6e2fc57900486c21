"""Steps that fail in an engine that goes on: all that was under way is dropped, and ours must not
wait for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import HOST, Engine
from engines.world import World, prompt

PROMPT, OTHER = prompt(21, 1100), prompt(22, 1100)
HIT = 1024
WHENS = ("before", "amid", "after", "ahead")


@pytest.fixture(scope="module")
def references(plain_llama: Engine) -> list[dict[str, Any]]:
    return [dict(found) for found in plain_llama.generate(prompts=[PROMPT, OTHER])]


def check_at_rest(engine: Engine, free: int) -> None:
    assert engine.settle(), "nothing is awaited for ever"
    facts = engine.facts()
    assert (facts["mistakes"], facts["pending"], facts["requests"]) == (0, 0, 0)
    assert engine.forget_engine_cache(), "nobody holds blocks of vLLM's"
    assert engine.facts()["free_blocks"] == free


AHEAD = {"host": HOST.with_name("ahead.py")}
SECOND = {"host": HOST.with_name("second_runner.py"), "fresh": True}


@pytest.mark.parametrize("runner", [{}, AHEAD, SECOND], ids=["one-by-one", "ahead", "second"])
def test_a_step_that_fails(
    world: World,
    model: Callable[..., Path],
    references: list[dict[str, Any]],
    runner: dict[str, Any],
) -> None:
    """vLLM takes what it was to compute for computed: it is served by no cache, here or there.
    And what was stored in it, or loaded, has ended, or never began."""
    options = {"max_num_batched_tokens": 500, "max_num_seqs": 4, "max_model_len": 1408}
    with world.engine(model("llama"), stack=world.stack(), **options, **runner) as engine:
        assert runner is not AHEAD or engine.is_ahead()
        free = engine.facts()["free_blocks"]
        for when in WHENS:
            engine.begin(prompt=PROMPT, tokens=16, steps=1)
            engine.fail_a_step(when=when)
            assert engine.generate(prompts=[PROMPT]) == [references[0] | {"cached": 0}]
            check_at_rest(engine, free)
            assert engine.generate(prompts=[PROMPT]) == [references[0] | {"cached": HIT}]
            check_at_rest(engine, free)
            engine.begin(prompt=PROMPT, tokens=16, steps=0)  # a load
            engine.fail_a_step(when=when)
            assert engine.generate(prompts=[OTHER]) == [references[1] | {"cached": 0}]
            check_at_rest(engine, free)
    with world.engine(model("llama"), stack=world.stack()) as engine:
        assert engine.generate(prompts=[PROMPT]) == [references[0] | {"cached": 0}]


def test_a_step_that_fails_while_others_load(
    world: World, model: Callable[..., Path], references: list[dict[str, Any]]
) -> None:
    """Their blocks are held on, and nothing else is: what was not computed is forgotten, and what
    comes is stored."""
    options = {"max_num_batched_tokens": 500, **AHEAD}
    stack = world.stack(load_deadline="10min") | {"mover": {"mode": "threads"}}
    with world.engine(model("llama"), stack=stack, **options) as engine:
        free = engine.facts()["free_blocks"]
        engine.generate(prompts=[PROMPT])
        assert engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.hold_reads()
        engine.begin(prompt=PROMPT, tokens=16)
        held = engine.facts()["free_blocks"]
        assert held < free, "a load is under way"
        engine.begin(prompt=OTHER, tokens=16, steps=1)
        engine.fail_a_step(when="amid")
        assert engine.facts()["free_blocks"] == held
        assert engine.generate(prompts=[OTHER]) == [references[1] | {"cached": 0}]
        engine.let_reads_go()
        check_at_rest(engine, free)
        assert engine.generate(prompts=[OTHER]) == [references[1] | {"cached": HIT}]
