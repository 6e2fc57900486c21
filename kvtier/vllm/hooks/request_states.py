"""What vLLM's side of the connector knows of each request: its keys, its limits, its blocks, and
the jobs under way for it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from kvtier.types import BlockKey, group_of


def positions(context: Any) -> Mapping[bytes, int]:
    """A request's keys with the token after each, in order, group by group."""
    ends: Mapping[bytes, int] = context._offload_key_positions
    return ends


def prompt_ends(connector: Any, request: Any) -> Mapping[bytes, int]:
    """The same; it grows as the request's hits are looked up."""
    return positions(_state(connector, request).req_context)


def _state(connector: Any, request: Any) -> Any:
    return connector.connector_scheduler._req_status[request.request_id]


def being_loaded(connector: Any) -> Collection[bytes]:
    """The keys that vLLM does not let a second request load, nor compute."""
    return connector.connector_scheduler._chunks_being_loaded or ()


def load_limit(connector: Any, request: Any, computed: int) -> int:
    """The token up to which a request may load: its own limit, or its end."""
    most = _state(connector, request).max_load_tokens
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


def heed_whole_chunks(connector: Any, request: Any) -> None:
    """Let a request's keys be looked for when there is one more: vLLM would go through all of its
    block hashes, in each step."""
    status = _state(connector, request)
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
