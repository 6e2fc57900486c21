"""Everything here that is private to vLLM or differs between its versions; nothing else may be,
but for its worker (errands.py), what it does before it reads its settings (plugin.py), what an
engine cannot do (limits.py), how layers are shared out (pipeline.py), what it need not look through
(resting.py), which blocks it gives out (given.py), who constructs a connector (above.py), what
stands in for its tracker of events (described.py), what it tells no connector (overheard.py), how
it knows requests by their names (namesakes.py) and which of them are sessions (sessions.py).

Supported are 0.31, 0.32 (the reference) and 0.33.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from kvtier.core.costs.hit_offers import Shape
from kvtier.types import BlockKey, group_of
from kvtier.vllm.worker.pipeline_layers import most_layers

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # 0.31 has none
    CacheHitSource = None

__all__ = [
    "CacheHitSource",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "RequestOffloadingContext",
    "TransferResult",
]


def batched_copy() -> Callable[[Any, Any, Any, bool], None]:
    """vLLM's own copy of many pieces in one call: tensors of sources, targets and sizes."""
    from vllm import _custom_ops

    copy: Callable[[Any, Any, Any, bool], None] = _custom_ops.swap_blocks_batch
    return copy


# -- configuration -----------------------------------------------------------------------------


def register(connector: type) -> None:
    """Let vLLM find a connector by its name alone, too.

    So it looks for those below a MultiConnector when their counters come from another process, and
    the server ends if it does not find one.
    """
    name = connector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, connector.__module__, name)


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


# -- requests ----------------------------------------------------------------------------------


def positions(context: Any) -> Mapping[bytes, int]:
    """A request's keys with the token after each, in order, group by group."""
    ends: Mapping[bytes, int] = context._offload_key_positions
    return ends


def prompt_ends(connector: Any, request: Any) -> Mapping[bytes, int]:
    """The same; it grows as the request's hits are looked up."""
    return positions(connector.connector_scheduler._req_status[request.request_id].req_context)


def being_loaded(connector: Any) -> Collection[bytes]:
    """The keys that vLLM does not let a second request load, nor compute."""
    scheduler = connector.connector_scheduler
    return getattr(scheduler, "_chunks_being_loaded", None) or ()


def blurred(connector: Any, scheduled: Any) -> list[str]:
    """All requests without an adapter, if this step computes such beside others with one."""
    statuses = connector.connector_scheduler._req_status
    bare = {name for name, status in statuses.items() if status.req.lora_request is None}
    now = statuses.keys() & scheduled.num_scheduled_tokens.keys()
    return sorted(bare) if now & bare and now - bare else []


def load_limit(connector: Any, request: Any, computed: int) -> int:
    """The token up to which a request may load: its own limit, or its end."""
    most = connector.connector_scheduler._req_status[request.request_id].max_load_tokens
    tokens: int = request.num_tokens
    return tokens if most is None else min(tokens, computed + most)


def part_at(request: Any, token: int) -> None:
    """Let vLLM keep states and windows at this token of a prompt, as it does where it sees prompts
    part: it sees those alone that are in its own cache."""
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, token)


def without_hits(connector: Any, request: Any, computed: int) -> tuple[int | None, bool]:
    """What the scheduler's side answers if it finds nothing."""
    scheduler = connector.connector_scheduler
    answer: tuple[int | None, bool] = scheduler.get_num_new_matched_tokens(request, computed, 0)
    return answer


def mend_groups(connector: Any) -> None:
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


@contextlib.contextmanager
def resettable(connector: Any) -> Iterator[None]:
    """Allow for a reset right after another, before the workers were told what to finish."""
    scheduler = connector.connector_scheduler
    before, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
    try:
        yield
    finally:
        scheduler._current_batch_jobs_to_flush |= before


def with_holes(connector: Any, keys: Collection[bytes], context: Any) -> set[bytes]:
    """Those chunks of a request of which some blocks have slid out of a window, or were given to
    others: vLLM looks at the last block of each only."""
    scheduler = connector.connector_scheduler
    size: int = scheduler.config.blocks_per_chunk
    states = scheduler._req_status[context.req_id].group_states
    groups = zip(scheduler.config.kv_group_configs, states, strict=True)
    windowed = {
        group.group_idx: (group.tokens_per_chunk, state.block_ids)
        for group, state in groups
        if group.sliding_window_size_in_chunks is not None
    }
    ends = positions(context)
    found = set()
    for key in keys if windowed and size > 1 else ():
        if (group := group_of(BlockKey(key))) in windowed:
            tokens, blocks = windowed[group]
            end = ends[key] // tokens * size
            if not all(blocks[end - size : end]):
                found.add(key)
    return found


def has_jobs(connector: Any) -> bool:
    """Whether workers have not reported all that they were told to copy."""
    return bool(connector.connector_scheduler._jobs)


def store_again(connector: Any, request: str) -> None:
    """After a failed load: let the recomputed chunks be stored, as if nothing had been found."""
    status = connector.connector_scheduler._req_status.get(request)
    for group in status.group_states if status is not None else ():
        group.next_stored_chunk_idx = 0


def nothing_to_transfer() -> Any:
    """What vLLM's side answers to a step in which nothing is stored or loaded."""
    return OffloadingConnectorMetadata({}, {}, set())


def read_as_0_33(connector: Any, scheduled: Any) -> Any:
    """A step's output without what 0.31 and 0.32 get wrong: all blocks of a session that goes on
    they take for more of them, and a load right after a reset's preemption ends the engine."""
    scheduler = connector.connector_scheduler
    for new in scheduled.scheduled_new_reqs:
        for group in scheduler._req_status[new.req_id].group_states:
            group.block_ids.clear()
    loads = {job.req_id for job in scheduler._current_batch_load_jobs.values()}
    preempted = scheduled.preempted_req_ids or set()
    if loads.isdisjoint(preempted):
        return scheduled
    return dataclasses.replace(scheduled, preempted_req_ids=preempted - loads)


def heed_whole_chunks(connector: Any, request: Any) -> None:
    """Let a request's keys be looked for when there is one more: vLLM would go through all of its
    block hashes, in each step."""
    status = connector.connector_scheduler._req_status[request.request_id]
    status.__class__ = _heedful(status.__class__)


@functools.cache
def _heedful(kind: Any) -> Any:
    def update_offload_keys(self: Any) -> None:
        hashes = len(self.req.block_hashes)
        groups = zip(self.config.kv_group_configs, self.group_states, strict=True)
        if any(hashes >= g.hashes_per_chunk * (len(s.offload_keys) + 1) for g, s in groups):
            kind.update_offload_keys(self)

    own = {"__slots__": (), "update_offload_keys": update_offload_keys}
    return type(kind.__name__, (kind,), own)


# -- events ------------------------------------------------------------------------------------


def describes_events(vllm_config: Any) -> bool:
    """Whether events are published, and are to say what is in the blocks that they tell of."""
    events, extra = vllm_config.kv_events_config, vllm_config.kv_transfer_config
    asked = extra.kv_connector_extra_config.get("self_describing_kv_events", False)
    return bool(events is not None and events.enable_kv_cache_events and asked)


def event_kinds(connector: Any) -> dict[int, tuple[str | None, int | None]]:
    """What cache groups are of, and their windows, as events name them."""
    groups = connector.connector_scheduler.config.kv_group_configs
    return {group.group_idx: tuple(group.kv_event_group_spec) for group in groups}


def track_events(connector: Any, tracker: Any) -> None:
    """Let events go by way of this, which is told what is stored and found, too."""
    connector.connector_scheduler._events_tracker = tracker


@contextlib.contextmanager
def manager_locked(connector: Any) -> Iterator[None]:
    """0.33 guards the manager with a lock; earlier ones call it from one thread only."""
    locked = getattr(connector.connector_scheduler, "_manager_locked", None)
    with locked() if locked is not None else contextlib.nullcontext():
        yield
