"""Sessions that vLLM goes on with from what is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import Engine
from engines.world import World, prompt

DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
STATES = {"dtype": "bfloat16", "enable_prefix_caching": True}
WARNING = "nothing is kept of them"
PIECES = [prompt(112, 60), prompt(212, 900)]


def test_an_answer_that_ends_amid_drafts(
    world: World, model: Callable[..., Path], plain_llama: Engine
) -> None:
    """vLLM takes for computed the tokens that come after it, up to where the drafts were right."""
    with world.engine(model("llama"), stack=world.stack(), speculative_config=DRAFTS) as engine:
        engine.converse(pieces=PIECES, tokens=12, only=97)
        asked = (PIECES[0] + [97] * 12 + PIECES[1])[:900]
        (first,) = engine.generate(prompts=[asked])  # finds what vLLM itself has of the session
        engine.forget_engine_cache()
        (found,) = engine.generate(prompts=[asked])
        engine.forget_engine_cache()
        (again,) = engine.generate(prompts=[asked])
        engine.settle()
        mistakes = engine.facts()["mistakes"]
        warned = WARNING in engine.log.read_text()
    (expected,) = plain_llama.generate(prompts=[asked])
    assert (first["tokens"] != expected["tokens"]) is warned, "vLLM 0.33 computes it right"
    assert found == expected | {"cached": 0 if warned else 768}
    assert again == expected | {"cached": 768}, "what was computed since is kept"
    assert mistakes == 0


@pytest.mark.parametrize("options", [DRAFTS, STATES], ids=["drafts", "states"])
def test_of_such_sessions_nothing_is_kept(
    world: World, model: Callable[..., Path], options: dict[str, Any]
) -> None:
    """Nor of what comes while vLLM has it in its own cache."""
    family = "llama" if options is DRAFTS else "qwen3_next"
    options = {"speculative_config": DRAFTS} if options is DRAFTS else options
    with world.engine(model(family), stack=world.stack(), **options) as engine:
        engine.converse(pieces=PIECES, tokens=8)
        engine.generate(prompts=[prompt(113, 900)])
        engine.settle()
        facts = engine.facts()
        warned = WARNING in engine.log.read_text()
        engine.forget_engine_cache()
        engine.generate(prompts=[prompt(113, 900)])
        engine.settle()
        kept = engine.facts()["chain"]["tiers"][0]["blocks"]
    assert warned or family == "llama", "vLLM 0.33 computes drafts right, and states wrong"
    assert ([tier["blocks"] for tier in facts["chain"]["tiers"]] == [0, 0]) is warned
    assert (facts["mistakes"], facts["pending"]) == (0, 0)
    assert kept > 0, "until that was reset"


def test_an_answer_that_ends_with_a_block(
    world: World, model: Callable[..., Path], plain_llama: Engine
) -> None:
    """vLLM 0.31 names a block of a session by the token that was dropped from its end."""
    pieces = [prompt(116, 116), PIECES[1]]
    with world.engine(model("llama"), stack=world.stack()) as engine:
        engine.converse(pieces=pieces, tokens=12, only=97)
        asked = (pieces[0] + [97] * 12 + pieces[1][1:])[:900]
        engine.forget_engine_cache()
        (found,) = engine.generate(prompts=[asked])
        engine.settle()
        mistakes = engine.facts()["mistakes"]
    (expected,) = plain_llama.generate(prompts=[asked])
    assert found == expected | {"cached": 0}
    assert mistakes == 0
