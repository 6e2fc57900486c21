"""Models that look back over a window: what slides out of it before a chunk is whole."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
from engines.engine import connector
from engines.world import World, chunk_tokens, prompt

from kvtier.errors import ConfigError
from kvtier.types import block_key

importing = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, through vLLM


def test_a_chunk_is_no_longer_than_a_window(world: World, model: Callable[..., Path]) -> None:
    """Here every step ends amid 256 tokens, of which those before the window are gone then."""
    asked = prompt(51, 2000)
    transfer = connector(world.stack())
    transfer["kv_connector_extra_config"]["blocks_per_chunk"] = 16
    options = {"block_size": 16, "max_num_batched_tokens": 425, "max_num_seqs": 4}
    with world.engine(model("gpt_oss"), transfer=transfer, **options) as engine:
        (cold,) = engine.generate(prompts=[asked])
        engine.settle()
        assert engine.facts()["failed_stores"] == 0
        engine.forget_engine_cache()
        assert engine.generate(prompts=[asked]) == [cold | {"cached": 1920}]
        warning = "blocks_per_chunk is ignored: of this model, 4 is the most"
        assert warning in engine.log.read_text(), "of 32 tokens, the least on a CPU"


def test_a_window_that_is_longer_than_chunks_by_a_token(
    world: World, model: Callable[..., Path]
) -> None:
    """As Cohere's are, whose layers see 4096 tokens before the one that looks."""
    folder = world.folder / "model"
    shutil.copytree(model("gemma3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 257}))
    asked = prompt(54, 2600)
    options = {"max_num_batched_tokens": 500, "max_num_seqs": 4}
    with world.engine(folder, **options) as plain:
        (cold,) = plain.generate(prompts=[asked])
    with world.engine(folder, stack=world.stack(), **options) as engine:
        assert engine.generate(prompts=[asked]) == [cold]
        engine.settle()
        engine.forget_engine_cache()
        assert engine.generate(prompts=[asked]) == [cold | {"cached": 2560}]
        assert engine.facts()["mistakes"] == 0


@pytest.mark.parametrize(("interval", "known"), [(0, 384), (256, 768)])
def test_what_was_decoded_is_found_where_windows_are_kept(
    world: World, model: Callable[..., Path], interval: int, known: int
) -> None:
    """If asked for: at the end of prompts alone, as vLLM comes, or every 256 tokens."""
    asked = prompt(56, 500)
    transfer = connector(world.stack())
    transfer["kv_connector_extra_config"]["offload_prompt_only"] = False
    with world.engine(model("gpt_oss")) as plain:
        (said,) = plain.generate(prompts=[asked], tokens=300)
        turn = asked + said["tokens"] + prompt(57, 100)
        (expected,) = plain.generate(prompts=[turn])
    options = {"prefix_cache_retention_interval": interval}
    with world.engine(model("gpt_oss"), transfer=transfer, **options) as engine:
        assert engine.generate(prompts=[asked], tokens=300) == [said]
        engine.forget_engine_cache()
        found = engine.generate(prompts=[turn])
        assert found == [{"tokens": expected["tokens"], "cached": known}]
        warning = "--prefix-cache-retention-interval, a multiple of 128 tokens"
        assert (warning in engine.log.read_text()) is (interval == 0)


@pytest.mark.parametrize(
    ("family", "dtype", "chunk"),
    [("llama", "float32", 256), ("gpt_oss", "float32", 128), ("qwen3_next", "bfloat16", None)],
)
def test_conversations_find_all_that_was_said(
    world: World, model: Callable[..., Path], family: str, dtype: str, chunk: int | None
) -> None:
    """Four at once, in steps that end anywhere, and never in vLLM's own cache."""
    options = {"dtype": dtype, "max_num_batched_tokens": 600, "max_num_seqs": 4}
    said = [prompt(61 + each, 771 + 90 * each) for each in range(4)]
    known = [0] * 4
    engine = world.engine(
        model(family), stack=world.stack(capacity="128MiB"), enable_prefix_caching=True, **options
    )
    chunk = chunk_tokens(engine, chunk)
    for turn in range(3):
        found = engine.generate(prompts=said, tokens=40)
        assert [each["cached"] for each in found] == known
        assert engine.settle()
        engine.forget_engine_cache()
        known = [(len(each) - 1) // chunk * chunk for each in said]
        said = [
            each + answer["tokens"] + prompt(70 + turn, 200)
            for each, answer in zip(said, found, strict=True)
        ]
    assert engine.facts()["failed_stores"] == 0


@pytest.mark.parametrize(
    ("family", "dtype", "chunk"),
    [("gpt_oss", "float32", 128), ("gemma3", "float32", 256), ("qwen3_next", "bfloat16", None)],
)
def test_where_prompts_part_something_is_kept(
    world: World, model: Callable[..., Path], family: str, dtype: str, chunk: int | None
) -> None:
    """vLLM itself keeps windows and states at the ends of prompts, and where it sees prompts part
    that are both in its own cache; here never are."""
    folder = model(family)
    prompts = [prompt(52, 1500) + prompt(53 + each, 600) for each in range(3)]
    options = {"dtype": dtype, "enable_prefix_caching": True}
    with world.engine(folder, **options) as plain:
        expected = [plain.generate(prompts=[each])[0]["tokens"] for each in prompts]
    with world.engine(folder, stack=world.stack(), **options) as engine:
        chunk = chunk_tokens(engine, chunk)
        known = 1500 // chunk * chunk
        for asked, tokens, cached in zip(prompts, expected, (0, 0, known), strict=True):
            found = engine.generate(prompts=[asked])
            assert found == [{"tokens": tokens, "cached": cached}]
            engine.forget_engine_cache()
        facts = engine.facts()
        assert (facts["failed_loads"], facts["failed_stores"], facts["mistakes"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("family", "dtype", "capacity", "chunk"),
    [("gpt_oss", "float32", "12MiB", 128), ("qwen3_next", "bfloat16", "6MiB", None)],
)
def test_what_many_prompts_begin_with_outlives_others(
    world: World,
    model: Callable[..., Path],
    family: str,
    dtype: str,
    capacity: str,
    chunk: int | None,
) -> None:
    """Its window, or state, too: without it the rest is of no use."""
    stack = world.stack(capacity=capacity)
    del stack["tiers"][1]
    options = {"dtype": dtype, "enable_prefix_caching": True}
    with world.engine(model(family), stack=stack, **options) as engine:
        found = []
        for each in range(10):
            asked = prompt(52, 1500) + prompt(100 + each, 200)
            found += [one["cached"] for one in engine.generate(prompts=[asked], tokens=1)]
            engine.generate(prompts=[prompt(200 + each, 1700)], tokens=1)
            engine.forget_engine_cache()
        facts = engine.facts()
        chunk = chunk_tokens(engine, chunk)
    assert found == [0, 0] + [1500 // chunk * chunk] * 8
    assert facts["chain"]["tiers"][0]["evicted"] > 50


def _kind(name: str, **fields: int) -> Any:
    return Made(kv_cache_spec=type(name, (), {"block_size": 16, **fields})())


@importing
def test_how_many_blocks_a_chunk_may_have() -> None:
    from kvtier.vllm.hooks import cache_groups

    full = _kind("FullAttentionSpec", sliding_window=128)
    window = _kind("SlidingWindowSpec", sliding_window=100)
    local = _kind("ChunkedLocalAttentionSpec", attention_chunk_size=64)
    tiny = _kind("SlidingWindowMLASpec", sliding_window=4)
    state = _kind("MambaSpec")
    wanted = [([full], None), ([full, window], 6), ([local, window], 4), ([window, tiny], 1)]
    for groups, blocks in [*wanted, ([full, state], 1)]:
        assert cache_groups.most_blocks(Made(kv_cache_groups=groups)) == blocks


@importing
def test_workers_cut_chunks_as_the_scheduler_does() -> None:
    """Of a group whose layers differ in size they are told all, and the scheduler one."""
    import torch
    from vllm.v1.core import kv_cache_utils as theirs
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    from kvtier.vllm.hooks import cache_groups

    layers = {
        f"layer.{size}": SlidingWindowSpec(
            block_size=16, num_kv_heads=1, head_size=size, dtype=torch.float32, sliding_window=128
        )
        for size in (64, 128)
    }
    group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs.from_specs(layers))
    pages = {name: spec.page_size_bytes for name, spec in layers.items()}
    tensors = [
        KVCacheTensor(
            size=8 * sum(pages.values()), layers=[name], layer_stride=8 * page, block_stride=page
        )
        for name, page in pages.items()
    ]
    worker = KVCacheConfig(num_blocks=8, kv_cache_tensors=tensors, kv_cache_groups=[group])
    scheduler = theirs.generate_scheduler_kv_cache_config([worker])
    assert cache_groups.most_blocks(worker) == cache_groups.most_blocks(scheduler) == 8
    for side in (worker, scheduler):
        assert cache_groups.page_bytes(side, side.kv_cache_groups[0]) == sum(pages.values())


@importing
def test_the_connector_above_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it constructs others from copies: vLLM goes by what is set for the first."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvtier.vllm.hooks import config as construction

    first, ours = Made(kv_transfer_config="first"), Made(kv_transfer_config="ours")

    def look(config: Any, role: Any, kv_cache_config: Any) -> list[Any]:
        assert construction.under_construction() == (config, kv_cache_config)
        return construction.transfer_configs(ours)

    monkeypatch.setattr(construction, "_watched", False)
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        construction.transfer_configs(ours)
    monkeypatch.setattr(KVConnectorFactory, "create_connector", look)
    construction.watch_construction()
    construction.watch_construction()
    create = partial(KVConnectorFactory.create_connector, role="SCHEDULER", kv_cache_config="kv")
    assert create(first) == ["ours", "first"]
    assert create(ours) == ["ours"]
    assert construction.transfer_configs(ours) == ["ours"], "none is under construction"


@importing
def test_blocks_of_a_context_that_ranks_share_are_longer() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvtier.vllm.hooks import cache_groups

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    groups = Made(kv_cache_groups=[Made(kv_cache_spec=spec)])
    shared = Made(parallel_config=Made(decode_context_parallel_size=2))
    assert cache_groups.block_tokens(shared, groups) == [32]


@importing
def test_chunks_with_holes_are_known() -> None:
    """vLLM stores what a request found in its own cache, too: from the middle of a chunk on."""
    from kvtier.vllm.hooks.scheduler import incomplete_chunks

    keys = {group: [block_key(bytes([at]) * 8, group) for at in range(3)] for group in (0, 1)}
    groups = [
        Made(group_idx=0, tokens_per_chunk=32, sliding_window_size_in_chunks=2),
        Made(group_idx=1, tokens_per_chunk=32, sliding_window_size_in_chunks=None),
    ]
    states = [Made(block_ids=[0, 0, 0, 7, 8, 9]), Made(block_ids=[1, 2, 3, 4, 5, 6])]
    scheduler = Made(
        config=Made(blocks_per_chunk=2, kv_group_configs=groups),
        _req_status={"r": Made(group_states=states)},
    )
    ends = {key: 32 * at for each in keys.values() for at, key in enumerate(each, 1)}
    context = Made(req_id="r", _offload_key_positions=ends)
    offered = [*keys[0], *keys[1]]
    found = incomplete_chunks(scheduler, offered, context)
    assert found == set(keys[0][:2])


def with_short_windows() -> Any:
    """vLLM's side of the scheduler, of a model whose windows are kept densely, and are shorter than
    the blocks of its other layers."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as theirs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    like: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    kinds = [
        FullAttentionSpec(block_size=256, **like),
        SlidingWindowSpec(block_size=64, sliding_window=128, **like),
    ]
    spec = Made(
        config=Made(
            groups=[
                Made(group_id=at, tokens_per_block=size, sliding_window_size_in_chunks=window)
                for at, (size, window) in enumerate([(256, None), (64, 2)])
            ]
        ),
        blocks_per_chunk=1,
        tokens_per_block=(256, 64),
        tokens_per_hash=64,
        offload_prompt_only=True,
        extra_config={},
        kv_events_config=Made(enable_kv_cache_events=False, self_describing_kv_events=False),
        get_manager=lambda: Made(
            lock=contextlib.nullcontext(),
            on_new_request=lambda _: None,
            on_schedule_end=lambda _: None,
            on_request_finished=lambda _: None,
            prepare_store=lambda keys, _: Made(keys_to_store=list(keys), store_spec=None),
        ),
    )
    return theirs.OffloadingConnectorScheduler(
        spec,
        Made(
            cache_config=Made(prefix_cache_retention_interval=None, enable_prefix_caching=True),
            parallel_config=Made(world_size=1, decode_context_parallel_size=1),
            speculative_config=None,
        ),
        Made(
            kv_cache_groups=[KVCacheGroupSpec([str(kind)], kind) for kind in kinds],
            cache_hit_alignment_tokens=None,
        ),
    )


@importing
def test_what_was_passed_over_of_a_window_may_be_anothers_at_the_end() -> None:
    """Where windows are kept densely, and are shorter than the blocks of other layers, vLLM looks
    at the last of them anew when a prompt is aborted."""
    from vllm.v1.request import RequestStatus

    from kvtier.vllm.hooks.block_pool import AllocatedBlocks

    scheduler = with_short_windows()
    request = Made(
        request_id="r",
        kv_transfer_params=None,
        kv_hints=None,
        num_prompt_tokens=1000,
        num_tokens=1000,
        num_computed_tokens=0,
        block_hashes=[bytes([at]) * 32 for at in range(15)],
        status=RequestStatus.RUNNING,
        is_finished=lambda: request.status is not RequestStatus.RUNNING,
    )
    pool = Made(
        get_new_blocks=lambda: [Made(block_id=15)], cache_full_blocks=None, cache_partial_block=None
    )
    told = AllocatedBlocks(pool)

    def step(**said: Any) -> dict[int, list[int]]:
        """What is stored by a step of which this is said: the blocks of each job."""
        nothing = Made(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        usual = {"scheduled_new_reqs": [], "num_scheduled_tokens": {}, "finished_req_ids": set()}
        scheduled = Made(
            **(usual | said),
            scheduled_cached_reqs=nothing,
            preempted_req_ids=set(),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        told.tell(scheduler, scheduled)
        meta = scheduler.build_connector_meta(scheduled)
        return {number: list(job.src_spec.block_ids) for number, job in meta.store_jobs.items()}

    scheduler.on_new_request(request)
    begun = Made(req_id="r", block_ids=([1, 2], list(range(11, 18))))
    assert step(scheduled_new_reqs=[begun], num_scheduled_tokens={"r": 430}) == {0: [1, 13, 14]}
    request.num_computed_tokens, request.status = 430, RequestStatus.FINISHED_ABORTED
    scheduler.request_finished(request)
    pool.get_new_blocks()
    assert step(finished_req_ids={"r"}) == {}, "15 is another's, and 16 is no use without it"
