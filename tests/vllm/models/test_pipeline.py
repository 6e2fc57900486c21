"""Pipelines, whose ranks hold some of a model's layers each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
from engines.world import World, flip_memory, prompt

PROMPT = prompt(21, 1100)
HIT = 1024


@pytest.mark.parametrize(
    ("family", "layers", "split"), [("llama", 4, "1,3"), ("gpt_oss", 6, "3,3")]
)
def test_ranks_of_a_pipeline_that_hold_different_layers(
    world: World, model: Callable[..., Path], family: str, layers: int, split: str
) -> None:
    """One here and three there, or two with a window here and one there: a record has as much room
    for each rank. (On CPUs vLLM's pipelines want a compiler, be it one that does nothing.)"""
    folder = model(family, layers=layers)
    with world.engine(folder) as plain:
        (expected,) = plain.generate(prompts=[PROMPT])
    options = {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 1, "backend": "eager"},
        "environment": {"VLLM_PP_LAYER_PARTITION": split},
        "stack": world.stack(),
    }
    with world.engine(folder, **options) as engine:
        assert engine.generate(prompts=[PROMPT]) == [expected]
        engine.forget_engine_cache()
        assert engine.generate(prompts=[PROMPT]) == [{**expected, "cached": HIT}]
        engine.forget_engine_cache()
        engine.clear(tier=0)
        assert engine.generate(prompts=[PROMPT]) == [{**expected, "cached": HIT}]
        engine.forget_engine_cache()
        flip_memory(engine)
        assert engine.generate(prompts=[PROMPT]) == [{**expected, "cached": 0}]
        facts = engine.facts()
        assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (1, 0, 0)
        engine.settle()
        engine.kill()
    with world.engine(folder, **options) as engine:
        assert engine.generate(prompts=[PROMPT]) == [{**expected, "cached": HIT}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM
def test_what_the_first_rank_tells_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.vllm.hooks.cache_groups import most_layers

    def most(kinds: list[str] | None, total: int, split: str, *groups: list[int]) -> list[int]:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", split)
        model = Made(
            hf_text_config=Made(layer_types=kinds), get_total_num_hidden_layers=lambda: total
        )
        engine: Any = Made(
            model_config=model,
            parallel_config=Made(pipeline_parallel_size=split.count(",") + 1),
        )
        names = [[f"model.layers.{at}.self_attn.attn" for at in group] for group in groups]
        return most_layers(engine, [Made(layer_names=each) for each in names])

    # Five windows for each layer that sees all, as Gemma 3 has them, in three groups of windows.
    kinds = ["full" if at % 6 == 5 else "window" for at in range(18)]
    windows = [at for at in range(8) if at != 5]
    groups = ([5], windows[0::3], windows[1::3], windows[2::3])
    assert most(kinds, 18, "8,10", *groups) == [2, 3, 3, 3]
    assert most(kinds, 18, "18", *groups) == [1, 3, 2, 2], "no pipeline"
    assert most(None, 18, "8,10", *groups) == [1, 3, 2, 2], "nobody knows of which kind they are"
    assert most(kinds, 20, "8,12", *groups) == [1, 3, 2, 2], "nor of how many there are kinds"
    assert most(kinds, 18, "8,10", *groups[:3]) == [1, 3, 2], "some layers hold nothing"
    assert most(kinds, 18, "8,10", *groups, []) == [1, 3, 2, 2, 0], "nor a group that is elsewhere"
    assert most(kinds, 18, "8,10", [0, 5], [1, 2, 3, 4, 6, 7]) == [2, 6], "kinds share a group"
    assert most(None, 7, "2,2,3", [0, 1]) == [3]
    assert most(None, 7, "3,2,2", [0, 1]) == [2], "a layer of the first rank holds nothing"
