"""Engines of several tensor-parallel sizes that share blocks: `across_degrees`.

Sums over heads have another order at another size, so that logits differ in their last bits: tokens
are compared up to the first place where the two best are nearly as good.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines.answers import HITS, ask, check, prompts
from engines.engine import HOST
from engines.families import AMX, MLA_DTYPE
from engines.world import World, flip

from kvtier.record.record import Header

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "one_kv_head"])
def test_one_rank_two_ranks_and_back(world: World, model: Callable[..., Path], family: str) -> None:
    """Each reads what the other has written: in its memory while both serve, on disk after they
    were killed, and in a store when all else is lost."""
    folder, stack = model(family), world.stack_across_degrees()
    of_two, of_one = prompts(60), prompts(70)
    two = {"tensor_parallel_size": 2, "stack": stack}
    with world.engine(folder, host=HOST.with_name("scored.py")) as plain:
        expected = {
            at: [plain.weigh(prompt=each) for each in asked]
            for at, asked in enumerate((of_two, of_one))
        }
    with world.engine(folder, **two) as first, world.engine(folder, stack=stack) as second:
        check(ask(first, of_two), expected[0], [0, 0])
        assert first.settle()
        second.look_around()
        check(ask(second, of_two), expected[0], HITS)
        assert second.facts()["chain"]["hits"][1:] == [0, 0], "all was in its neighbour's memory"
        check(ask(second, of_one), expected[1], [0, 0])
        assert second.settle()
        first.look_around()
        check(ask(first, of_one), expected[1], HITS)
        assert first.facts()["chain"]["hits"][1:] == [0, 0]
        for engine in (first, second):
            assert engine.settle()
            facts = engine.facts()
            assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (0, 0, 0)
            engine.kill()
    least = [min(each["margins"]) for of in expected.values() for each in of]
    print(f"{family}: margins of {len(least)} prompts are {min(least):.2g} at least")
    by_one, by_two = {"stack": stack}, two
    ways = [(1, by_one), (2, by_two)]  # the least that reads both sizes' records by both
    if family == "llama":
        ways += [(1, by_two), (2, by_one)]
    for tier, options in sorted(ways, key=lambda way: way[0]):
        world.lose_tiers(tier)
        with world.engine(folder, **options) as engine:
            check(ask(engine, of_two + of_one), expected[0] + expected[1], HITS + HITS)
            facts = engine.facts()
            hits = facts["chain"]["hits"]
            assert hits[tier] == sum(hits)
            assert (facts["failed_loads"], facts["mistakes"]) == (0, 0)
            if tier == 1:
                assert engine.settle()  # what was not in the store is there then
            engine.kill()
    records = list((world.folder / "bucket").glob("*/blocks/*/*/*"))
    parts = {Header.read(each.read_bytes()).parts for each in records}
    assert parts == ({1} if family == "one_kv_head" else {1, 2}), "of what all have, one writes"
    (described,) = (world.folder / "bucket").glob("*/namespace.json")
    described_as = json.loads(described.read_text())
    assert (described_as["parts"], described_as["facts"]["tensor_parallel"]) == (None, "any")


def test_all_ranks_share_a_latent_cache(world: World, model: Callable[..., Path]) -> None:
    """MLA: records have one part at every size, and what one size has stored the other stores no
    more. (Without AMX vLLM's MLA for CPUs computes prompts as a whole, and loads none.)"""
    folder, stack = model("deepseek_v2"), world.stack_across_degrees()
    asked, blocks = prompts(60), sum(HITS) // 256
    for ranks, stored in ((2, blocks), (1, 0)):
        options = {"tensor_parallel_size": ranks, "dtype": MLA_DTYPE}
        with world.engine(folder, stack=stack, **options) as engine:
            found = ask(engine, asked)
            assert [each["cached"] for each in found] == (HITS if AMX and not stored else [0, 0])
            engine.settle()
            facts = engine.facts()
            assert facts["namespace"]["tensor_parallel"] == "any"
            assert (facts["failed_stores"], facts["mistakes"]) == (0, 0)
            assert [each["stored"] for each in facts["chain"]["tiers"]] == [stored] * 3
            engine.kill()
    records = list((world.folder / "bucket").glob("*/blocks/*/*/*"))
    assert [Header.read(each.read_bytes()).parts for each in records] == [1] * blocks


def test_what_is_spoilt_is_computed_by_an_engine_of_another_size(
    world: World, model: Callable[..., Path]
) -> None:
    folder, stack = model("llama"), world.stack_across_degrees()
    with world.engine(folder, tensor_parallel_size=2, stack=stack) as engine:
        expected = engine.generate(prompts=prompts(80))
        engine.settle()
        engine.kill()
    for region in world.region.iterdir():
        shutil.rmtree(region)
    for slab in world.blocks.rglob("*.slab"):
        flip(slab, 6144)
    with world.engine(folder, stack=stack) as engine:
        assert engine.generate(prompts=prompts(80)) == expected
        assert engine.facts()["failed_loads"] > 0
        assert engine.facts()["mistakes"] == 0


def test_what_divides_no_heads_stays_of_one_size(world: World, model: Callable[..., Path]) -> None:
    """States of a hybrid model; its namespace is as without the setting, and the log says why."""
    with world.engine(
        model("qwen3_next"), dtype="bfloat16", stack=world.stack_across_degrees()
    ) as engine:
        assert engine.facts()["namespace"]["tensor_parallel"] == "1"
        engine.kill()
        assert "engines of other tensor-parallel sizes find nothing of this one" in engine.tail()


def configs(degree: int, *specs: Any, heads: int = 8, layout: str = "LBNHC", **more: Any) -> Any:
    """What vLLM says of an engine, as far as it is asked."""
    parallel = {"world_size": degree, "decode_context_parallel_size": 1} | more
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=degree, **parallel),
        cache_config=SimpleNamespace(kv_cache_layout=layout, cache_dtype="auto"),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_key_value_heads=heads)),
    )
    groups = [SimpleNamespace(kv_cache_spec=each, layer_names=["0"]) for each in specs]
    return vllm_config, SimpleNamespace(kv_cache_groups=groups, num_blocks=4)


def spec_of(kind: str = "FullAttentionSpec", kv_quant_mode: str = "NONE", **fields: Any) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface

    mode = kv_cache_interface.KVQuantMode[kv_quant_mode]
    usual = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": torch.float16}
    return getattr(kv_cache_interface, kind)(kv_quant_mode=mode, **(usual | fields))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: configs(2, spec_of()), None),
        (lambda: configs(2, spec_of(), spec_of("SlidingWindowSpec", sliding_window=64)), None),
        (lambda: configs(1, spec_of(num_kv_heads=8)), None),
        (lambda: configs(1, spec_of("MLAAttentionSpec", num_kv_heads=1), heads=1), None),
        (lambda: configs(2, spec_of(kv_quant_mode="FP8_PER_TENSOR")), None),
        (lambda: configs(2, spec_of(), heads=6), "2 ranks do not divide 6 KV heads"),
        (lambda: configs(16, spec_of(num_kv_heads=1)), None),
        (lambda: configs(12, spec_of(num_kv_heads=1)), "12 ranks do not divide 8 KV heads"),
        (lambda: configs(2, spec_of(), spec_of(num_kv_heads=2)), "of every layer alike"),
        (lambda: configs(2, spec_of(), world_size=4), "layers or contexts"),
        (lambda: configs(2, spec_of(), decode_context_parallel_size=2), "layers or contexts"),
        (lambda: configs(2, spec_of(), layout="LHBNC"), "LHBNC mixes heads"),
        (lambda: configs(2, spec_of(state_content_bytes=20)), "scales of their own"),
        (lambda: configs(2, spec_of(kv_quant_mode="NVFP4")), "scales of their own"),
        (
            lambda: configs(2, spec_of(kv_quant_mode="INT8_PER_TOKEN_HEAD")),
            "scales of their own",
        ),
    ],
)
def test_which_caches_are_of_one_size_alone(made: Callable[[], Any], why: str | None) -> None:
    from kvtier.vllm.hooks import cache_groups

    found = cache_groups.bound_to_degree(*made())
    assert found is None if why is None else why in str(found)


def test_where_heads_lie_is_seen_in_the_tensors() -> None:
    """Of tokens and of whole pages; not of what is laid out otherwise than vLLM says."""
    import torch

    from kvtier.vllm.hooks import cache_groups

    spec = spec_of()  # a page: 4 heads, 16 tokens, 2 x 8 numbers of two bytes
    by_heads = torch.zeros(4, 4, 16, 16, dtype=torch.float16)
    by_tokens = torch.zeros(4, 16, 4, 16, dtype=torch.float16).transpose(1, 2)
    of_half_blocks = torch.zeros(8, 8, 4, 16, dtype=torch.float16).transpose(1, 2)

    def shape(layout: str, cache: Any, spec: Any = spec) -> Any:
        return cache_groups.head_shapes(*configs(2, spec, layout=layout), [0], {"0": cache})[0][0]

    assert shape("LBHNC", by_heads) == (4, 16 * 16 * 2)
    assert shape("LBNHC", by_tokens) == (4, 16 * 2)
    assert shape("LBNHC", of_half_blocks) == (4, 16 * 2)
    unknown = [
        shape("LBNHC", by_heads),
        shape("LBHNC", by_tokens),
        shape("LBHNC", torch.zeros(8, 4, 8, 16, dtype=torch.float16)),
        shape("LBHNC", by_heads, spec_of(num_kv_heads=2)),
        shape("LBHNC", by_heads[:, :, :8]),
        shape("LBHNC", [by_heads]),
    ]
    assert unknown == [(0, 0)] * len(unknown)
    latent = spec_of("MLAAttentionSpec", num_kv_heads=1)
    assert shape("LBHNC", None, latent) == (1, 16 * 8 * 2)
