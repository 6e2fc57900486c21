"""What is known of a request that waits in vLLM's queue: its keys, its turn, and what of its prompt
vLLM's own cache has."""

from __future__ import annotations

from typing import Any

from kvtier.types import GROUP_BYTES, BlockKey, group_of
from kvtier.vllm.hooks.request_states import load_limit, prompt_ends
from kvtier.vllm.waiting_prefetches import Waits


def as_it_waits(connector: Any, request: Any, pool: Any, *, by_priority: bool) -> Waits | None:
    """A request that was just added; None if it will load nothing. Its keys, which vLLM makes when
    it first looks for them, are made now."""
    if request.skip_reading_prefix_cache or request.num_computed_tokens:
        return None
    connector.connector_scheduler._req_status[request.request_id].update_offload_keys()

    def cached(key: bytes) -> bool:
        group = [group_of(BlockKey(key))]
        return pool is not None and pool.get_cached_block(key[:-GROUP_BYTES], group) is not None

    # As `Request.__lt__` orders them; the order of coming decides between equals.
    rank = (float(request.priority), float(request.arrival_time)) if by_priority else ()
    return Waits(rank, prompt_ends(connector, request), load_limit(connector, request, 0), cached)
