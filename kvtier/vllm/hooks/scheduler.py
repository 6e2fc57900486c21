"""vLLM's `OffloadingConnectorScheduler` and the state that it keeps of each request.

The functions read a request's keys, limits, blocks and jobs, and correct what vLLM would get wrong
in a step. None of them imports vLLM: they work on the objects that they are given.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvtier.types import GROUP_BYTES, BlockKey, group_of
from kvtier.vllm.hints import Action
from kvtier.vllm.misses import PromptFacts
from kvtier.vllm.waiting_prefetches import Waits

# -- requests --------------------------------------------------------------------------------------


def request_state(scheduler: Any, request: Any) -> Any:
    """What vLLM's side knows of a request."""
    return scheduler._req_status[request.request_id]


def key_positions(context: Any) -> Mapping[bytes, int]:
    """A request's keys with the token after each, in order, group by group. The mapping grows as
    vLLM looks up the request's hits."""
    ends: Mapping[bytes, int] = context._offload_key_positions
    return ends


def all_key_positions(scheduler: Any, request: Any) -> Mapping[bytes, int]:
    """The same for all whole chunks: vLLM makes their keys when it next looks a request up."""
    state = request_state(scheduler, request)
    state.update_offload_keys()
    return key_positions(state.req_context)


def load_limit(state: Any, request: Any, computed: int) -> int:
    """The token up to which a request may load: its own limit, or its end."""
    most = state.max_load_tokens
    tokens: int = request.num_tokens
    return tokens if most is None else min(tokens, computed + most)


def waiting_request(scheduler: Any, request: Any, pool: Any, *, by_priority: bool) -> Waits | None:
    """What a request that was just added will load, and when its turn comes; None if it will load
    nothing."""
    if request.skip_reading_prefix_cache or request.num_computed_tokens:
        return None

    def cached(key: bytes) -> bool:
        group = [group_of(BlockKey(key))]
        return pool is not None and pool.get_cached_block(key[:-GROUP_BYTES], group) is not None

    # As `Request.__lt__` orders them; requests with equal ranks are served in order of arrival.
    rank = (float(request.priority), float(request.arrival_time)) if by_priority else ()
    ends = all_key_positions(scheduler, request)
    return Waits(rank, ends, load_limit(request_state(scheduler, request), request, 0), cached)


def hints_of(request: Any) -> tuple[object, list[Action]]:
    """A request's `kv_transfer_params`, and the actions of its `kv_hints`."""
    actions = request.kv_hints.actions if request.kv_hints is not None else ()
    return request.kv_transfer_params, [
        Action(each.action_type, each.action_version, each.payload) for each in actions
    ]


def prompt_of(request: Any) -> PromptFacts:
    """A request's prompt. One with images, or that is made of embeddings, is not its tokens
    alone."""
    tokens = () if request.mm_features else request.prompt_token_ids or ()
    adapter = request.lora_request
    name = "" if adapter is None else adapter.name
    return PromptFacts(request.num_prompt_tokens, tokens, request.cache_salt or "", name)


def keep_state_at(request: Any, token: int) -> None:
    """Let vLLM keep states and windows at this token of a prompt. It does so by itself where
    prompts diverge, but it compares them with its own prefix cache alone."""
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, token)


# -- jobs and chunks -------------------------------------------------------------------------------


def loading_keys(scheduler: Any) -> Collection[bytes]:
    """The keys under load, which vLLM lets no second request load or compute."""
    return scheduler._chunks_being_loaded or ()


def has_jobs(scheduler: Any) -> bool:
    """Whether a worker has not reported all that it was told to copy."""
    return bool(scheduler._jobs)


def incomplete_chunks(scheduler: Any, keys: Collection[bytes], context: Any) -> set[bytes]:
    """The chunks of a request of which some blocks have slid out of a window, or were given to
    other requests: vLLM looks at the last block of each only."""
    size: int = scheduler.config.blocks_per_chunk
    states = scheduler._req_status[context.req_id].group_states
    windowed = {
        group.group_idx: (group.tokens_per_chunk, state.block_ids)
        for group, state in zip(scheduler.config.kv_group_configs, states, strict=True)
        if group.sliding_window_size_in_chunks is not None
    }
    ends = key_positions(context)
    found = set()
    for key in keys if windowed and size > 1 else ():
        if (group := group_of(BlockKey(key))) in windowed:
            tokens, blocks = windowed[group]
            end = ends[key] // tokens * size
            if not all(blocks[end - size : end]):
                found.add(key)
    return found


def store_again(scheduler: Any, request: str) -> None:
    """After a failed load: have the recomputed chunks stored, as if nothing had been found."""
    state = scheduler._req_status.get(request)
    for group in state.group_states if state is not None else ():
        group.next_stored_chunk_idx = 0


# -- steps -----------------------------------------------------------------------------------------


def corrected_step(scheduler: Any, scheduled: Any) -> Any:
    """A step's output without what vLLM 0.32 gets wrong. When a request begins anew (a session that
    continues, or a load of another connector), 0.32 appends its blocks to those from before. And a
    load right after the preemption of a reset ends the engine."""
    if hasattr(scheduler, "_manager_locked"):  # from 0.33 on
        return scheduled
    for new in scheduled.scheduled_new_reqs:
        for group in scheduler._req_status[new.req_id].group_states:
            group.block_ids.clear()
    loads = {job.req_id for job in scheduler._current_batch_load_jobs.values()}
    preempted = scheduled.preempted_req_ids or set()
    if loads.isdisjoint(preempted):
        return scheduled
    return dataclasses.replace(scheduled, preempted_req_ids=preempted - loads)


@contextlib.contextmanager
def resettable(scheduler: Any) -> Iterator[None]:
    """Allow a reset right after another, before the workers were told which jobs to finish."""
    before, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
    try:
        yield
    finally:
        scheduler._current_batch_jobs_to_flush |= before


def manager_locked(scheduler: Any) -> contextlib.AbstractContextManager[None]:
    """The lock with which 0.33 guards the manager; 0.32 calls the manager from one thread only."""
    locked = getattr(scheduler, "_manager_locked", contextlib.nullcontext)
    lock: contextlib.AbstractContextManager[None] = locked()
    return lock


# -- events ----------------------------------------------------------------------------------------


def event_kinds(scheduler: Any) -> dict[int, tuple[str | None, int | None]]:
    """The kind and the window of each cache group, as events name them."""
    return {
        group.group_idx: tuple(group.kv_event_group_spec)
        for group in scheduler.config.kv_group_configs
    }


def track_events(scheduler: Any, tracker: Any) -> None:
    """Replace vLLM's tracker of events, which is also told what is stored and found."""
    scheduler._events_tracker = tracker
