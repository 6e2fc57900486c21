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
WHENS = ("before", "amid", "after")


@pytest.fixture(scope="module")
def references(plain_llama: Engine) -> list[dict[str, Any]]:
    return [dict(found) for found in plain_llama.generate(prompts=[PROMPT, OTHER])]


def check_at_rest(engine: Engine, free: int) -> None:
    assert engine.settle(), "nothing is awaited for ever"
    facts = engine.facts()
    assert (facts["mistakes"], facts["pending"], facts["requests"]) == (0, 0, 0)
    assert engine.forget_engine_cache(), "nobody holds blocks of vLLM's"
    assert engine.facts()["free_blocks"] == free


SECOND = {"host": HOST.with_name("second_runner.py"), "fresh": True}


@pytest.mark.parametrize("runner", [{}, SECOND], ids=["first", "second"])
@pytest.mark.parametrize("ahead", [False, True], ids=["one-by-one", "ahead"])
def test_a_step_that_fails(
    world: World,
    model: Callable[..., Path],
    references: list[dict[str, Any]],
    ahead: bool,
    runner: dict[str, Any],
) -> None:
    """vLLM takes what it was to compute for computed: it is served by no cache, here or there.
    And what was stored in it, or loaded, has ended, or never began."""
    options = {"max_num_batched_tokens": 500, "max_num_seqs": 4, "async_scheduling": ahead}
    options |= runner | {"max_model_len": 1408}
    with world.engine(model("llama"), stack=world.stack(), **options) as engine:
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
