"""The cache groups of an engine: how large their blocks are, how many of these make one stored
block, and what vLLM's side of the connector is told about them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

from kvtier.chain.hits import Shape
from kvtier.vllm.hooks.pipeline_layers import most_layers


def block_tokens(vllm_config: Any, kv_cache_config: Any) -> list[int]:
    """Tokens a block, of every cache group; where a context is computed by several ranks, the
    block of each of them holds its part."""
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    groups = kv_cache_config.kv_cache_groups
    return [resolve_dcp_kv_block_size(group.kv_cache_spec, ranks) for group in groups]


def most_blocks(kv_cache_config: Any) -> int | None:
    """How many blocks a chunk may have, if not any number. A state (of Mamba and its kin) is there
    only at the end of a block; and of a chunk that is longer than a window its first blocks may
    slide out before its last are computed."""
    limits = []
    for spec in layer_specs(kv_cache_config):
        kind = type(spec).__name__
        if "Mamba" in kind:
            limits.append(1)
        elif "SlidingWindow" in kind:
            limits.append(max(1, spec.sliding_window // spec.block_size))
        elif "ChunkedLocal" in kind:
            limits.append(max(1, spec.attention_chunk_size // spec.block_size))
    return min(limits, default=None)


def layer_specs(kv_cache_config: Any) -> Iterator[Any]:
    """What every cache group is of. For layers that differ in size, workers are told of each, and
    the scheduler of one."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        yield from getattr(spec, "kv_cache_specs", {"any": spec}).values()


def chunk_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[tuple[int, ...], int, int]:
    """The payload of a chunk of every cache group, all ranks together; its blocks; its parts.

    Groups that are not offloaded, or of which the first rank has no layer, have no chunks: they are
    given the largest size, which no block will ever have.
    """
    config = build_offloading_config(vllm_config, kv_cache_config)
    blocks: int = config.cache.blocks_per_chunk
    parts = 1 if ranks_alike(config) else config.parallel.world_size
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


def ranks_alike(config: Any) -> bool:
    """Whether all ranks hold the same KV cache: the latent one of MLA, under tensor parallelism."""
    return bool(config.replicated_layout and not config.canonical_layout)


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


# -- what vLLM's side of the connector knows of them -----------------------------------------------


def group_shapes(connector: Any) -> dict[int, Shape]:
    """How the cache groups that are offloaded keep a prompt, as the scheduler's side knows them."""
    return {
        group.group_idx: Shape(
            group.tokens_per_chunk,
            group.sliding_window_size_in_chunks,
            "Mamba" in type(group.kv_cache_spec).__name__,
        )
        for group in connector.connector_scheduler.config.kv_group_configs
    }


def correct_groups(connector: Any) -> None:
    """Change three things that vLLM's side does with cache groups. Of a hybrid model's prompt it
    keeps what is behind the last whole chunk, too: that is never found here, and a request whose
    `max_offload_tokens` end before it would end the engine. Of a window it asks for the tokens
    before the next one, and for that one itself, for which it may want a chunk more than it keeps:
    those before are enough. With a drafter it takes a chunk off each hit, for better guesses: no
    state or window may be kept where that ends, so hits end as without one."""
    scheduler = connector.connector_scheduler
    groups = [group._replace(is_eagle_group=False) for group in scheduler.config.kv_group_configs]
    scheduler.config = scheduler.config._replace(
        supports_partial_tail=False, kv_group_configs=tuple(map(_without_next, groups))
    )


def _without_next(group: Any) -> Any:
    spec = group.kv_cache_spec
    if "SlidingWindow" not in type(spec).__name__:
        return group
    before = max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
    return group._replace(sliding_window_size_in_chunks=-(-before // group.tokens_per_chunk))


def loses_decoded(connector: Any) -> int | None:
    """Where what is decoded is kept, but not found again, because windows or states are kept at the
    end of prompts alone: the tokens of which the distance of others must be a multiple."""
    config = connector.connector_scheduler.config
    groups = config.kv_group_configs
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    sparse = any("SlidingWindow" in kind or "Mamba" in kind for kind in kinds)
    if config.offload_prompt_only or config.retention_interval != 0 or not sparse:
        return None
    return math.lcm(*(group.tokens_per_chunk for group in groups))
