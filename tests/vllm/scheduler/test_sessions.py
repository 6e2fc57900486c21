"""Sessions, to whose input more is added after each answer: nothing is kept of them."""

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
WARNING = "nothing is kept from now on"
PIECES = [prompt(112, 60), prompt(212, 900)]
OTHER = prompt(113, 900)


@pytest.mark.parametrize("options", [{}, DRAFTS, STATES], ids=["plain", "drafts", "states"])
def test_others_are_kept_unless_they_may_find_what_is_wrong(
    world: World, model: Callable[..., Path], options: dict[str, Any]
) -> None:
    """Of an answer that ends amid drafts which were right vLLM takes for computed what comes after
    it, and states have seen tokens that are dropped: that is in its own cache from then on."""
    family = "qwen3_next" if options is STATES else "llama"
    options = {"speculative_config": DRAFTS} if options is DRAFTS else options
    with world.engine(model(family), stack=world.stack(), **options) as engine:
        engine.converse(pieces=PIECES, tokens=12, only=97)
        engine.settle()
        facts = engine.facts()
        assert [tier["stored"] for tier in facts["chain"]["tiers"]] == [0, 0]
        engine.generate(prompts=[OTHER])
        engine.settle()
        warned = WARNING in engine.log.read_text()
        kept = engine.facts()["chain"]["tiers"][0]["stored"]
        engine.forget_engine_cache()
        engine.generate(prompts=[prompt(114, 900)])
        engine.settle()
        later = engine.facts()["chain"]["tiers"][0]["stored"]
    assert warned or family == "llama", "vLLM 0.33 computes drafts right, and states wrong"
    assert (kept == 0) is warned
    assert (later == 0) is warned, "a session that is still there would go on with it"
    assert (facts["mistakes"], facts["pending"]) == (0, 0)


def test_what_a_session_has_left_does_not_reach_a_tier(
    world: World, model: Callable[..., Path], plain_llama: Engine
) -> None:
    """Others who ask for as much find what is right, whatever vLLM itself has of it."""
    for drafts in ({}, {"speculative_config": DRAFTS}):
        with world.engine(model("llama"), stack=world.stack(), **drafts) as engine:
            engine.converse(pieces=PIECES, tokens=12, only=97)
            asked = (PIECES[0] + [97] * 12 + PIECES[1])[:900]
            engine.generate(prompts=[asked])
            engine.forget_engine_cache()
            (found,) = engine.generate(prompts=[asked])
        (expected,) = plain_llama.generate(prompts=[asked])
        assert found["tokens"] == expected["tokens"]
