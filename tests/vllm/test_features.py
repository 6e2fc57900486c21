"""What else vLLM's scheduler can do, with a stack below it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import Engine, connector
from engines.world import World, flip, prompt

PROMPT = prompt(21, 1100)
HIT = 1024
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


@pytest.fixture(scope="module")
def reference(plain_llama: Engine) -> dict[str, Any]:
    (found,) = plain_llama.generate(prompts=[PROMPT])
    return dict(found)


def check_cold_and_warm(engine: Engine, reference: dict[str, Any]) -> None:
    """Cold, then from the CPU tier, then from the NVMe tier."""
    assert engine.generate(prompts=[PROMPT]) == [reference]
    engine.forget_engine_cache()
    assert engine.generate(prompts=[PROMPT]) == [{**reference, "cached": HIT}]
    engine.forget_engine_cache()
    engine.clear(tier=0)
    assert engine.generate(prompts=[PROMPT]) == [{**reference, "cached": HIT}]
    engine.settle()
    facts = engine.facts()
    assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (0, 0, 0)
    assert (facts["pending"], facts["requests"]) == (0, 0)
    assert engine.sources() in ({"host": HIT, "disk": HIT}, {}), "0.31 does not count them"


def test_two_ranks_and_a_restart(
    world: World, model: Callable[..., Path], reference: dict[str, Any]
) -> None:
    """Each rank writes its part of every record."""
    options = {"tensor_parallel_size": 2, "stack": world.stack()}
    with world.engine(model("llama"), **options) as engine:
        check_cold_and_warm(engine, reference)
        assert engine.facts()["namespace"]["tensor_parallel"] == "2"
        engine.kill()
    with world.engine(model("llama"), **options) as engine:
        assert engine.generate(prompts=[PROMPT]) == [{**reference, "cached": HIT}]


def test_of_ranks_that_hold_the_same_one_writes(world: World, model: Callable[..., Path]) -> None:
    """The latent cache of MLA. (Without AMX vLLM can load none on a CPU: see test_families.)"""
    options = {"tensor_parallel_size": 2, "stack": world.stack()}
    with world.engine(model("deepseek_v2"), **options) as engine:
        engine.generate(prompts=[PROMPT])
        assert engine.settle()
        facts = engine.facts()
    assert (facts["failed_stores"], facts["mistakes"], facts["pending"]) == (0, 0, 0)
    assert [tier["blocks"] for tier in facts["chain"]["tiers"]] == [HIT // 256] * 2
    (described,) = world.blocks.rglob("namespace.json")
    assert json.loads(described.read_text())["parts"] == 1


def test_two_engines_share_a_folder(
    world: World, model: Callable[..., Path], reference: dict[str, Any]
) -> None:
    """What one has stored the other finds, while both serve."""
    other_prompt = prompt(22, 1100)
    with (
        world.engine(model("llama"), stack=world.stack()) as first,
        world.engine(model("llama"), stack=world.stack()) as second,
    ):
        assert first.generate(prompts=[PROMPT]) == [reference]
        first.settle()
        second.look_around()
        assert second.generate(prompts=[PROMPT]) == [{**reference, "cached": HIT}]
        assert second.facts()["chain"]["hits"] == [0, HIT // 256]
        (found,) = second.generate(prompts=[other_prompt])
        second.settle()
        second.kill()
        first.look_around()
        assert first.generate(prompts=[other_prompt]) == [{**found, "cached": HIT}]


def test_priorities_drafts_and_patterns(world: World, model: Callable[..., Path]) -> None:
    """Scheduling by priority, speculative decoding by n-grams, structured output."""
    options = {"scheduling_policy": "priority", "speculative_config": NGRAM}
    pattern = "(yes|no|perhaps){1,4}"

    def ask(engine: Engine) -> list[dict[str, Any]]:
        return [
            engine.generate_with(prompt=PROMPT, tokens=40, priority=3),
            engine.generate_with(prompt=PROMPT, tokens=12, regex=pattern),
        ]

    with world.engine(model("llama"), **options) as plain:
        expected = [each["tokens"] for each in ask(plain)]
    with world.engine(model("llama"), stack=world.stack(), **options) as engine:
        assert [each["tokens"] for each in ask(engine)] == expected
        engine.forget_engine_cache()
        warm = ask(engine)
        assert [each["tokens"] for each in warm] == expected
        assert warm[0]["cached"] == HIT
        engine.settle()
    with world.engine(model("llama"), stack=world.stack(), **options) as engine:
        again = ask(engine)
        assert [each["tokens"] for each in again] == expected
        assert again[0]["cached"] == HIT, "after kill -9"
    with world.engine(model("llama"), stack=world.stack()) as engine:
        (found,) = engine.generate(prompts=[PROMPT], tokens=40)
        assert found == {"tokens": expected[0], "cached": 0}, "a namespace of its own"


def test_an_object_store_below(
    world: World, model: Callable[..., Path], reference: dict[str, Any]
) -> None:
    """All else is lost, and found there; and what is spoilt there is computed anew. Events name
    the medium."""
    bucket = world.folder / "bucket"
    bucket.mkdir()
    stack = world.stack()
    stack["tiers"].append({"kind": "object", "url": bucket.as_uri(), "capacity": "1GiB"})
    options = {"enable_kv_cache_events": True, "publisher": "null"}
    with world.engine(model("llama"), stack=stack, kv_events_config=options) as engine:
        engine.record_events()
        assert engine.generate(prompts=[PROMPT]) == [reference]
        engine.settle()
        engine.clear(tier=0)
        events = {tuple(each) for each in engine.events()}
        engine.kill()
    assert {("BlockStored", "CPU"), ("BlockRemoved", "CPU"), ("BlockStored", "STORAGE")} <= events
    shutil.rmtree(world.blocks)
    for region in world.region.iterdir():
        region.unlink()
    with world.engine(model("llama"), stack=stack) as engine:
        assert engine.generate(prompts=[PROMPT]) == [{**reference, "cached": HIT}]
        assert engine.facts()["chain"]["hits"] == [0, 0, HIT // 256]
        engine.forget_engine_cache()
        for tier in (0, 1):
            engine.clear(tier=tier)
        for each in bucket.rglob("*"):
            if each.is_file() and each.stat().st_size > 1 << 16:
                flip(each, 5000)
        (found,) = engine.generate(prompts=[PROMPT])
        assert found["tokens"] == reference["tokens"]
        engine.settle()
        facts = engine.facts()
        assert (facts["failed_loads"], facts["mistakes"]) == (1, 0)
        assert facts["chain"]["tiers"][2]["corrupt"] > 0


def test_without_an_engine_cache(
    world: World, model: Callable[..., Path], reference: dict[str, Any]
) -> None:
    """And without loads that 0.33 takes for certain to succeed, though they are asked for."""
    transfer = connector(world.stack())
    transfer["kv_connector_extra_config"]["sync_load_budget_bytes"] = 1 << 30
    with world.engine(model("llama"), transfer=transfer, enable_prefix_caching=False) as engine:
        check_cold_and_warm(engine, reference)
        engine.forget_engine_cache()
        flip(Path(engine.facts()["region"]), 1 << 20)
        assert engine.generate(prompts=[PROMPT]) == [reference]
