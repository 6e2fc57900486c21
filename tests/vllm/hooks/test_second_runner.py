"""vLLM's second model runner, which is the one that runs on CUDA: it writes to blocks that have
changed hands before its connector may copy out what was in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import HOST
from engines.world import World, prompt

TOKENS = 12


@pytest.mark.parametrize(("family", "blocks"), [("llama", 12), ("gpt_oss", 24)])
def test_what_was_overwritten_is_not_kept(
    world: World, model: Callable[..., Path], family: str, blocks: int
) -> None:
    folder = model(family)
    runner: dict[str, Any] = {"host": HOST.with_name("second_runner.py"), "fresh": True}
    first, second = prompt(1, 1280), prompt(2, 1280)
    tight = {"num_gpu_blocks_override": blocks, "max_num_seqs": 1, "max_model_len": 1408}
    with world.engine(folder, **runner) as plain:
        (reference,) = plain.generate(prompts=[first], tokens=TOKENS)
    with world.engine(folder, stack=world.stack(), **runner, **tight) as engine:
        assert engine.is_second()
        engine.generate(prompts=[first, second], tokens=1)
        for _ in range(2):
            (found,) = engine.generate(prompts=[first], tokens=TOKENS)
            assert found["tokens"] == reference["tokens"]
            engine.generate(prompts=[second], tokens=1)
        facts = engine.facts()
        assert (facts["failed_loads"], facts["mistakes"]) == (0, 0)
        assert facts["chain"]["hits"][0] > 0, "what was copied out in time is kept"


@pytest.mark.parametrize(("family", "tokens"), [("llama", 1), ("gpt_oss", 30)])
def test_what_others_find_while_it_is_copied_is_kept(
    world: World, model: Callable[..., Path], family: str, tokens: int
) -> None:
    """Questions about one document, each of which finds it in the engine's own cache: all of them
    have its blocks, and none writes to these."""
    runner: dict[str, Any] = {"host": HOST.with_name("second_runner.py"), "fresh": True}
    document = prompt(4, 1088)
    with world.engine(model(family), stack=world.stack(), max_model_len=1408, **runner) as engine:
        for number in range(6):
            question = document + prompt(50 + number, 20)
            if tokens == 1:
                engine.generate_with(prompt=question, tokens=1)
            else:
                engine.begin(prompt=question, tokens=tokens, steps=1)
        for _ in range(6 if tokens > 1 else 0):
            engine.end()
        engine.settle()
        facts = engine.facts()
        assert (facts["failed_stores"], facts["mistakes"]) == (0, 0)
        engine.forget_engine_cache()
        answer = engine.generate_with(prompt=document + prompt(60, 20), tokens=1)
        assert answer["cached"] == 1024
