"""What a model has seen belongs to its KV cache: images under the same text never mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import Engine, EngineError
from engines.world import World, prompt

TEXT = prompt(61, 1100)
HIT = 1024


def look(engine: Engine, image: int) -> dict[str, Any]:
    (found,) = engine.generate(prompts=[TEXT], more=[{"image": image}])
    return dict(found)


def test_each_image_has_its_own_blocks(world: World, model: Callable[..., Path]) -> None:
    folder = model("blip2")
    with world.engine(folder) as plain:
        cold = {image: look(plain, image) for image in (1, 2, 3)}
    assert len({tuple(each["tokens"]) for each in cold.values()}) == 3, "it looks at them"
    warm = {image: {**each, "cached": HIT} for image, each in cold.items()}

    with world.engine(folder, stack=world.stack()) as engine:
        assert look(engine, 1) == cold[1]
        engine.forget_engine_cache()
        assert look(engine, 2) == cold[2], "nothing of another image's"
        engine.forget_engine_cache()
        assert [look(engine, 1), look(engine, 2)] == [warm[1], warm[2]]
        engine.forget_engine_cache()
        engine.clear(tier=0)
        assert [look(engine, 1), look(engine, 2)] == [warm[1], warm[2]], "from the NVMe tier"
        engine.settle()
        assert engine.facts()["mistakes"] == 0

    with world.engine(folder, stack=world.stack()) as engine:
        found = [look(engine, image) for image in (2, 3, 1)]
        assert found == [warm[2], cold[3], warm[1]], "after kill -9"


def test_clients_may_send_no_more_than_without_a_stack(
    world: World, model: Callable[..., Path]
) -> None:
    """vLLM takes embeddings in place of images from everybody if a connector may bring them, and
    ends with a request that leaves them out."""
    with world.engine(model("blip2"), stack=world.stack()) as engine:
        with pytest.raises(EngineError, match="--enable-mm-embeds"):
            engine.generate(prompts=[TEXT], more=[{"embeddings": [8, 256]}])
        assert look(engine, 1)["cached"] == 0
        assert "ends the engine" not in engine.log.read_text()
    with world.engine(model("blip2"), stack=world.stack(), enable_mm_embeds=True) as engine:
        assert engine.generate(prompts=[TEXT], more=[{"embeddings": [8, 256]}])[0]["tokens"]
