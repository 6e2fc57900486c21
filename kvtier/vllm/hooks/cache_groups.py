"""vLLM's cache groups: the sizes of their blocks, how many of these make a chunk, and what the
scheduler's side of the connector is told about them.

`layer_specs` to `chunk_sizes` read vLLM's configuration; the functions below them read or change
the configuration of an `OffloadingConnectorScheduler`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

from kvtier.chain.hits import Shape
from kvtier.device.layout import HeadShape


def layer_specs(kv_cache_config: Any) -> Iterator[Any]:
    """The spec of every cache group. For layers that differ in size, workers are told of each, and
    the scheduler of one."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        yield from getattr(spec, "kv_cache_specs", {"any": spec}).values()


def is_recurrent(spec: Any) -> bool:
    """Whether the spec is of states (Mamba, gated delta nets) and not of attention."""
    return "Mamba" in type(spec).__name__


def has_window(spec: Any) -> bool:
    """Whether the spec is of a sliding window."""
    return "SlidingWindow" in type(spec).__name__


def block_tokens(vllm_config: Any, kv_cache_config: Any) -> list[int]:
    """Tokens a block, of every cache group. Where several ranks compute a context together, the
    block of each of them holds its part."""
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    groups = kv_cache_config.kv_cache_groups
    return [resolve_dcp_kv_block_size(group.kv_cache_spec, ranks) for group in groups]


def most_blocks(kv_cache_config: Any) -> int | None:
    """The most blocks that a chunk may have; None without a limit. A state exists only at the end
    of a block, and a chunk longer than a window would lose its first blocks before its last ones
    are computed."""
    limits = []
    for spec in layer_specs(kv_cache_config):
        if is_recurrent(spec):
            limits.append(1)
        elif has_window(spec):
            limits.append(max(1, spec.sliding_window // spec.block_size))
        elif "ChunkedLocal" in type(spec).__name__:
            limits.append(max(1, spec.attention_chunk_size // spec.block_size))
    return min(limits, default=None)


def chunk_sizes(
    vllm_config: Any, kv_cache_config: Any, copies: int
) -> tuple[tuple[int, ...], int, int]:
    """The payload of a chunk of every cache group, all ranks together; its blocks; its parts, each
    of which so many ranks hold.

    A group that is not offloaded, or of which the first rank has no layer, has no chunks: it is
    given the largest size, which no block will ever have.
    """
    config = build_offloading_config(vllm_config, kv_cache_config)
    blocks: int = config.cache.blocks_per_chunk
    parts = config.parallel.world_size // copies
    scale = blocks * parts
    groups = kv_cache_config.kv_cache_groups
    layers = most_layers(vllm_config, groups)
    sizes = {
        at: scale * page_bytes(kv_cache_config, groups[at]) * layers[at] // len(names)
        for at in (group.group_id for group in config.groups)
        if (names := groups[at].layer_names)
    }
    largest = max(sizes.values())
    return tuple(sizes.get(at, largest) for at in range(len(groups))), blocks, parts


def ranks_alike(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether all ranks hold the same KV cache: the latent one of MLA, under tensor parallelism."""
    config = build_offloading_config(vllm_config, kv_cache_config)
    return bool(config.replicated_layout and not config.canonical_layout)


def copies_of_shares(vllm_config: Any, kv_cache_config: Any, *, any_degree: bool) -> int:
    """How many ranks hold the same share of every block: all of them a latent cache, and several a
    KV head where there are more ranks than heads. Such a head is kept once if ranks of any degree
    load it; else by each of them, as ever."""
    parallel = vllm_config.parallel_config
    if ranks_alike(vllm_config, kv_cache_config):
        return int(parallel.world_size)
    return _replicas(vllm_config) if any_degree else 1


def _replicas(vllm_config: Any) -> int:
    """How many ranks hold the same KV head; the ranks of a head follow each other."""
    heads = _kv_heads(vllm_config)
    return max(1, vllm_config.parallel_config.tensor_parallel_size // heads) if heads else 1


def _kv_heads(vllm_config: Any) -> int | None:
    return getattr(vllm_config.model_config.hf_text_config, "num_key_value_heads", None)


def bound_to_degree(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why ranks of another tensor-parallel size cannot load these blocks; None if they can.

    Every rank must hold its share of the heads of every layer, be it as another does, and nothing
    else, or all ranks the same latent cache. Scales that each rank computes from its own heads are
    of that share alone.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    degree = parallel.tensor_parallel_size
    if parallel.world_size != degree or parallel.decode_context_parallel_size > 1:
        return "its ranks divide layers or contexts, too"
    specs = list(layer_specs(kv_cache_config))
    kinds = {type(spec).__name__ for spec in specs}
    if kinds == {_LATENT}:
        if degree == 1 or ranks_alike(vllm_config, kv_cache_config):
            return None
        return "its ranks are on several machines"
    if others := kinds - _BY_HEADS:
        return f"a cache of {', '.join(sorted(others))} is not divided by heads"
    heads, replicas = _kv_heads(vllm_config), _replicas(vllm_config)
    if heads is None or any(spec.num_kv_heads * degree != heads * replicas for spec in specs):
        return f"{degree} ranks do not divide {heads} KV heads among them, of every layer alike"
    if getattr(cache, "calculate_kv_scales", False) or any(map(_is_packed, specs)):
        return f"blocks of {cache.cache_dtype} have scales of their own"
    if (layout := getattr(cache, "kv_cache_layout", None)) not in _HEADS_TOGETHER:
        return f"the layout {layout} mixes heads with blocks or layers"
    return None


_LATENT = "MLAAttentionSpec"
_BY_HEADS = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
_PLAIN = ("NONE", "FP8_PER_TENSOR")
_HEADS_TOGETHER = ("LBHNC", "LBNHC")
"""Layers, then blocks; within these, heads that have all their tokens together, or tokens that have
all their heads."""


def _is_packed(spec: Any) -> bool:
    """Whether blocks are anything but plain numbers, a place for each of a token's."""
    plain = {"num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1}
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    return mode not in _PLAIN or any(
        getattr(spec, name, usual) != usual for name, usual in plain.items()
    )


def head_shapes(
    vllm_config: Any, kv_cache_config: Any, groups: Sequence[int], caches: Mapping[str, Any]
) -> list[list[HeadShape]]:
    """How the heads of each layer of these cache groups lie in its pages, as its tensor shows."""
    layout = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    blocks = kv_cache_config.num_blocks
    found = []
    for group in (kv_cache_config.kv_cache_groups[at] for at in groups):
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec))
        found.append(
            [_head_shape(specs[name], caches[name], layout, blocks) for name in group.layer_names]
        )
    return found


def _head_shape(spec: Any, cache: Any, layout: str | None, blocks: int) -> HeadShape:
    """A latent cache is one head, which nobody divides."""
    if type(spec).__name__ == _LATENT:
        return HeadShape(1, _unpadded(spec))
    if layout not in _HEADS_TOGETHER or getattr(cache, "ndim", 0) != 4:
        return HeadShape()
    by_tokens = layout == "LBNHC"
    page = cache[0].transpose(0, 1) if by_tokens else cache[0]
    heads, size = cache.shape[1], cache.element_size()
    # A block of vLLM's may be several of the attention backend's, one behind the other: each of
    # them has all heads, and only that of a few tokens can be told from the outside.
    of_backend = cache.shape[0] // blocks
    whole = of_backend * page.numel() * size == _unpadded(spec) and (by_tokens or of_backend == 1)
    if not whole or heads != spec.num_kv_heads or not page.is_contiguous():
        return HeadShape()
    return HeadShape(heads, (page[0, 0] if by_tokens else page[0]).numel() * size)


def page_bytes(kv_cache_config: Any, group: Any) -> int:
    """One block of all layers of a group on one rank, without padding.

    Of layers that differ in size the scheduler is told the first, and how far apart the blocks of
    each lie.
    """
    spec, names = group.kv_cache_spec, group.layer_names
    layers = getattr(spec, "kv_cache_specs", None)
    if layers:
        return sum(_unpadded(layers[name]) for name in names)
    size = _unpadded(spec)
    strides = {
        name: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    apart = [strides.get(name) for name in names]
    return sum(size if stride in (None, apart[0]) else stride for stride in apart)


def _unpadded(spec: Any) -> int:
    size = getattr(spec, "unpadded_page_size_bytes", None)
    if size is None:
        size = dataclasses.replace(spec, page_size_padded=None).page_size_bytes
    return int(size)


def most_layers(vllm_config: Any, groups: Sequence[Any]) -> list[int]:
    """Of each cache group, the most layers that any rank of a pipeline holds. The scheduler is told
    of the first rank alone: its counts stand where nothing is known of the others.

    vLLM gives every n-th layer of a kind to a group, so that each rank has nearly as many.
    """
    first = [len(group.layer_names) for group in groups]
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    if ranks == 1:
        return first
    model = vllm_config.model_config
    total = model.get_total_num_hidden_layers()
    kinds = getattr(model.hf_text_config, "layer_types", None)
    kinds = ["any"] * total if len(groups) == 1 else kinds
    spans = [get_pp_indices(total, rank, ranks) for rank in range(ranks)]
    if not kinds or len(kinds) != total or sum(first) != spans[0][1] - spans[0][0]:
        return first
    holds = [{kinds[_layer_index(name)] for name in group.layer_names} for group in groups]
    if any(len(each) != 1 for each in holds):
        return first
    found = []
    for (kind,), count in zip(holds, first, strict=True):
        most = max(kinds[start:stop].count(kind) for start, stop in spans)
        found.append(max(count, -(-most // holds.count({kind}))))
    return found


def _layer_index(layer_name: str) -> int:
    return next(int(part) for part in layer_name.split(".") if part.isdigit())


# -- the scheduler's side --------------------------------------------------------------------------


def group_shapes(scheduler: Any) -> dict[int, Shape]:
    """How the cache groups that are offloaded keep a prompt."""
    return {
        group.group_idx: Shape(
            group.tokens_per_chunk,
            group.sliding_window_size_in_chunks,
            is_recurrent(group.kv_cache_spec),
        )
        for group in scheduler.config.kv_group_configs
    }


def correct_groups(scheduler: Any) -> None:
    """Change three things in vLLM's configuration of cache groups.

    - vLLM stores what a hybrid model's prompt has behind its last whole chunk. kvtier never finds
      that, and a request whose `max_offload_tokens` end before it would end the engine.
    - Of a window vLLM asks for the tokens before the next one and for that one itself, which may
      take a chunk more than it keeps. The tokens before are enough.
    - With a drafter vLLM takes a chunk off each hit, for better guesses. No state or window may be
      kept where that ends, so hits end as without a drafter.
    """
    groups = [group._replace(is_eagle_group=False) for group in scheduler.config.kv_group_configs]
    scheduler.config = scheduler.config._replace(
        supports_partial_tail=False, kv_group_configs=tuple(map(_without_next, groups))
    )


def _without_next(group: Any) -> Any:
    spec = group.kv_cache_spec
    if not has_window(spec):
        return group
    before = max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
    return group._replace(sliding_window_size_in_chunks=-(-before // group.tokens_per_chunk))


def unfound_decode_unit(scheduler: Any) -> int | None:
    """None if decoded tokens are found again, or not kept. Else windows or states are kept at the
    end of prompts alone: the number of tokens of which a retention interval must be a multiple."""
    config = scheduler.config
    groups = config.kv_group_configs
    sparse = any(
        has_window(group.kv_cache_spec) or is_recurrent(group.kv_cache_spec) for group in groups
    )
    if config.offload_prompt_only or config.retention_interval != 0 or not sparse:
        return None
    return math.lcm(*(group.tokens_per_chunk for group in groups))
