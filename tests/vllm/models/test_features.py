"""What else vLLM's scheduler can do, with a stack below it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.engine import HOST, Engine, connector
from engines.families import MLA_DTYPE
from engines.world import World, flip, flip_memory, prompt

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
    assert engine.sources() == {"host": HIT, "disk": HIT}


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
    options = {"tensor_parallel_size": 2, "stack": world.stack(), "dtype": MLA_DTYPE}
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
    """What one has stored the other finds, while both serve, be it with memory of its own."""
    other_prompt = prompt(22, 1100)
    apart = world.stack()
    apart["tiers"][0]["name"] = "apart"
    with (
        world.engine(model("llama"), stack=world.stack()) as first,
        world.engine(model("llama"), stack=apart) as second,
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
        events = {(each["kind"], each.get("medium")) for each in engine.events()}
        engine.kill()
    assert {("BlockStored", "CPU"), ("BlockRemoved", "CPU"), ("BlockStored", "STORAGE")} <= events
    shutil.rmtree(world.blocks)
    for region in world.region.iterdir():
        shutil.rmtree(region)
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
        flip_memory(engine)
        assert engine.generate(prompts=[PROMPT]) == [reference]


def test_what_another_connector_loads_is_not_stored_for_what_was_there(
    world: World, model: Callable[..., Path], plain_llama: Engine
) -> None:
    """A load of the second connector takes the blocks of a request that has ended, while the first
    is still copying them out."""
    prompts = [prompt(22 + number, 1100) for number in range(2)]
    expected = [each["tokens"] for each in plain_llama.generate(prompts=prompts)]
    stack = world.stack()
    stacks = [stack | {"name": name, "tiers": stack["tiers"][:1]} for name in ("one", "two")]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector(each) for each in stacks]},
    }
    few = {"num_gpu_blocks_override": 12, "max_model_len": 1280, "max_num_seqs": 1}
    with world.engine(model("llama"), transfer=transfer, **few) as engine:
        engine.generate(prompts=prompts)
        engine.forget_engine_cache()
        engine.clear(tier=0)
        engine.slow_stores(pause=0.1)
        engine.generate(prompts=prompts, tokens=1)
        engine.slow_stores(pause=0)
        engine.forget_engine_cache()
        engine.look_at(connector=1)
        engine.clear(tier=0)
        found = [engine.generate(prompts=[each])[0] for each in prompts]
        assert [each["cached"] for each in found] == [HIT, HIT]
        assert [each["tokens"] for each in found] == expected


def test_what_another_connector_did_not_load_is_not_built_upon(
    world: World, model: Callable[..., Path], reference: dict[str, Any]
) -> None:
    """The second one says after a step that what it should have loaded before it is missing. vLLM
    computes all of it anew, but what the step computed was on its way into the tiers already."""
    forgetful = {
        "kv_connector": "Forgetful",
        "kv_connector_module_path": "forgetful",
        "kv_role": "kv_both",
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector(world.stack()), forgetful]},
    }
    with world.engine(model("llama"), transfer=transfer, max_num_batched_tokens=512) as engine:
        for _ in range(3):
            (answer,) = engine.generate(prompts=[PROMPT])
            assert answer["tokens"] == reference["tokens"]
            engine.forget_engine_cache()
        assert answer["cached"] == HIT


def test_what_the_engine_has_itself_is_not_pushed_out(
    world: World, model: Callable[..., Path]
) -> None:
    """A prompt asked again and again is in vLLM's own cache, and not looked up below. If others
    push it out there, it is written anew; and lost, should the engine end before that."""
    asked = PROMPT[: HIT + 1]
    stack = world.stack(capacity="24MiB")
    del stack["tiers"][1]
    with world.engine(model("llama"), stack=stack) as engine:
        for each in range(8):
            (found,) = engine.generate(prompts=[asked], tokens=1)
            assert found["cached"] == HIT * (each > 0)
            engine.generate(prompts=[prompt(61 + each, 1100)], tokens=1)
            engine.settle()
        (tier,) = engine.facts()["chain"]["tiers"]
        assert tier["evicted"] > 0
        assert tier["stored"] == 9 * HIT // 256, "each once"


def test_embeddings(world: World, model: Callable[..., Path]) -> None:
    """(Where all tokens are pooled, none may be left out: test_refusals.)"""
    prompts = [prompt(41, 1100), prompt(42, 700)]
    with world.engine(model("llama"), pooling="LAST") as plain:
        expected = plain.embed(prompts=prompts)
    chunks = sum(len(each) // 256 for each in prompts)
    with world.engine(model("llama"), pooling="LAST", stack=world.stack()) as engine:
        for turn in range(2):
            for found, wanted in zip(engine.embed(prompts=prompts), expected, strict=True):
                assert found == pytest.approx(wanted, abs=1e-5)
            # At once: nobody steps an engine that is its caller's, once it has answered.
            facts = engine.facts()
            assert (facts["pending"], facts["chain"]["tiers"][0]["stored"]) == (0, chunks)
            assert (facts["chain"]["hits"][0] > 0) is (turn == 1)
            assert engine.counted(counter="kvtier:hit_blocks_total") == sum(facts["chain"]["hits"])
            engine.forget_engine_cache()
    assert (facts["failed_loads"], facts["mistakes"]) == (0, 0)


def test_a_hybrid_prompt_of_which_little_may_be_stored(
    world: World, model: Callable[..., Path]
) -> None:
    """vLLM would keep its end, too, where prefixes match within a block. And of several blocks a
    chunk, which are asked for, none would ever be found."""
    options = {"dtype": "bfloat16", "enable_prefix_caching": True, "prefix_match_unit": 64}
    limits = {"max_offload_tokens": 256}
    transfer = connector(world.stack())
    transfer["kv_connector_extra_config"]["blocks_per_chunk"] = 2
    with world.engine(model("qwen3_next"), transfer=transfer, **options) as engine:
        cold = engine.generate_with(prompt=PROMPT, limits=limits)
        engine.forget_engine_cache()
        assert engine.generate_with(prompt=PROMPT) == cold, "no state of so few tokens is left"
        engine.forget_engine_cache()
        assert engine.generate_with(prompt=PROMPT) == cold | {"cached": HIT}


def test_a_request_that_fails_amid_its_prompt(
    world: World, model: Callable[..., Path], reference: dict[str, Any]
) -> None:
    """Its last blocks are there, but only a part of them is computed."""
    options = {"max_num_batched_tokens": 500, "max_num_seqs": 4}
    with world.engine(model("llama"), stack=world.stack(), **options) as engine:
        engine.fail(prompt=PROMPT)
        assert engine.settle()
        engine.forget_engine_cache()
        (found,) = engine.generate(prompts=[PROMPT])
    assert found == reference | {"cached": found["cached"]}
    assert found["cached"] < 500


def test_a_prompt_whose_tokens_are_scored(world: World, model: Callable[..., Path]) -> None:
    """What is loaded has no scores: all of it is computed, and kept for others."""
    scored: dict[str, Any] = {"host": HOST.with_name("scored.py")}
    with world.engine(model("llama"), stack=world.stack(), **scored) as engine:
        scores = engine.score(prompt=PROMPT)
        engine.forget_engine_cache()
        assert engine.score(prompt=PROMPT) == scores
        engine.forget_engine_cache()
        assert engine.generate(prompts=[PROMPT])[0]["cached"] == HIT
        assert engine.facts()["mistakes"] == 0


def test_prompts_that_are_no_tokens(world: World, model: Callable[..., Path]) -> None:
    """Vectors are not mixed up, though vLLM counts the same token for each."""
    scored: dict[str, Any] = {"host": HOST.with_name("scored.py"), "enable_prompt_embeds": True}
    with world.engine(model("llama"), stack=world.stack(), **scored) as engine:
        answers = [engine.continue_embeddings(seed=seed, length=1100) for seed in range(2)]
        assert answers[0]["tokens"] != answers[1]["tokens"]
        assert [each["cached"] for each in answers] == [0, 0]
        for tier in (0, 1):
            engine.forget_engine_cache()
            if tier:
                engine.clear(tier=0)
            for seed, before in enumerate(answers):
                found = engine.continue_embeddings(seed=seed, length=1100)
                assert found == before | {"cached": HIT}
        assert engine.facts()["mistakes"] == 0
