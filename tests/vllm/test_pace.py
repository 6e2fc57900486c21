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
    stack = world.stack() | {"loads": "worthwhile"}
    paced: dict[str, Any] = {"host": HOST.with_name("paced.py")}
    with world.engine(model("llama"), stack=stack, **paced) as engine:
        engine.generate(prompts=[prompt(41, 1100)], tokens=1)
        assert engine.overlap(prompt=prompt(42, 1100)) == [[0], [1100]]
