"""Models whose layers differ in size, and lie in one cache group all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.engine import HOST
from engines.world import World, prompt

PROMPTS = [prompt(71 + seed, 1100) for seed in range(2)]
HIT = 1024


def test_layers_that_differ_in_size(world: World, model: Callable[..., Path]) -> None:
    """vLLM's scheduler is told of the first only."""
    mixed: dict[str, Any] = {"host": HOST.with_name("mixed.py")}
    with world.engine(model("llama"), stack=world.stack(), **mixed) as engine:
        cold = engine.generate(prompts=PROMPTS)
        assert cold[0]["tokens"] != cold[1]["tokens"]
        for lost in ([], [0]):
            engine.forget_engine_cache()
            for tier in lost:
                engine.clear(tier=tier)
            assert engine.generate(prompts=PROMPTS) == [{**each, "cached": HIT} for each in cold]
        facts = engine.facts()
    assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (0, 0, 0)
