"""Two engines on one machine share CPU memory: what one has computed is a hit for the other one,
without a disk, also while its owner dies, or overwrites it as fast as it can."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import Engine
from engines.world import World, prompt

PROMPTS = [prompt(700 + seed, 1100) for seed in range(5)]
CHUNKS = 1024 // 256
ROUNDS = 6


@pytest.fixture(scope="module")
def reference(plain_llama: Engine) -> list[list[int]]:
    return [each["tokens"] for each in plain_llama.generate(prompts=PROMPTS)]


def memory_alone(world: World, capacity: str) -> dict[str, Any]:
    stack = world.stack(capacity=capacity)
    return stack | {"tiers": stack["tiers"][:1]}


def from_neighbours(engine: Engine) -> int:
    found: int = engine.facts()["chain"]["tiers"][0]["neighbour_loads"]
    return found


def test_the_first_request_for_what_a_neighbour_has_computed_is_a_hit(
    world: World, model: Callable[..., Path], reference: list[list[int]]
) -> None:
    stack = memory_alone(world, "64MiB")
    with (
        world.engine(model("llama"), stack=stack) as one,
        world.engine(model("llama"), stack=stack) as two,
    ):
        assert [each["tokens"] for each in one.generate(prompts=PROMPTS)] == reference
        assert one.settle()
        two.look_around()
        begun = []
        for number, each in enumerate(PROMPTS):
            begun.append(two.begin(prompt=each, tokens=16, steps=1))
            if number == 2:
                one.kill()  # -9, while this is being loaded
        found = [two.end(of=each) for each in begun]
        assert [each["tokens"] for each in found] == reference
        assert [each["cached"] for each in found] == [1024] * len(PROMPTS)
        least = CHUNKS * 3  # it may have adopted the dead one's memory before the last two loads
        assert least <= from_neighbours(two) <= CHUNKS * len(PROMPTS)
        two.forget_engine_cache()
        again = two.generate(prompts=PROMPTS)
        assert again == found, "the neighbour's memory outlives it"
        facts = two.facts()
        assert (facts["failed_loads"], facts["mistakes"]) == (0, 0)


def test_a_neighbour_that_overwrites_what_is_being_loaded_makes_no_answer_wrong(
    world: World, model: Callable[..., Path]
) -> None:
    """What was overwritten under a load's eyes is computed, and nothing else happens."""
    stack = memory_alone(world, "16MiB")
    with (
        world.engine(model("llama"), stack=stack) as one,
        world.engine(model("llama"), stack=stack) as two,
    ):
        for number in range(ROUNDS):
            asked, *others = (
                [prompt(10_000 + 1000 * number + 100 * part + seed, 1100) for seed in range(5)]
                for part in range(5)
            )
            answers = one.generate(prompts=asked)
            overwriting = threading.Thread(
                target=one.generate,
                kwargs={"prompts": [each for part in others for each in part], "tokens": 1},
            )
            overwriting.start()
            found = two.generate(prompts=asked)
            overwriting.join()
            assert [each["tokens"] for each in found] == [each["tokens"] for each in answers]
        assert one.facts()["chain"]["tiers"][0]["evicted"] > 0
        facts = two.facts()
        assert facts["mistakes"] == 0
        assert facts["chain"]["tiers"][0]["corrupt"] == 0
        assert from_neighbours(two) > 0
