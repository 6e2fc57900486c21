"""Requests of which nothing can be stored for a while: most of those that decode.

vLLM's scheduler side looks through all requests in each step, at some microseconds each. A step of
hundreds of them would take a millisecond or two longer, though only a few have anything new. So it
is told of those few alone, and of a step without any it is told nothing. They are not looked for
among all requests, either: for each it is known how many tokens it lacks, and for all together how
many tokens any of them can have been given.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from itertools import compress
from typing import Any

from kvtier.guard import guarded
from kvtier.vllm.hooks.block_pool import AllocatedBlocks


class IdleRequests:
    """Knows up to how many tokens each request can be left out of what vLLM is told of a step.

    A step is first asked about (`all_rest`); if it is told to vLLM, what is left of it is looked at
    (`leave_out`) and taken note of (`looked_at`).
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._until: dict[str, float] = {}
        """With how many tokens vLLM has to be told of a request; of none that is not in here can
        that be said."""
        self._growing: set[str] = set()
        """Those of them that will have something to be stored: vLLM must know their blocks."""
        self._due: list[tuple[int, str]] = []
        """A heap of these, by what `_advance` will be at the earliest when they have it."""
        self._advance = 0
        """The most tokens that any request can have been given since the engine started."""
        self._awake: set[str] = set()
        """Of whom all is to be looked at again, though they go on."""
        groups = scheduler.config.kv_group_configs
        self._windowed = any(g.sliding_window_size_in_chunks is not None for g in groups)

    @guarded(lambda: False)
    def all_rest(self, scheduled: Any, given: AllocatedBlocks | None) -> bool:
        """Whether nobody comes, ends, or has anything to be stored in a step, and vLLM's side has
        nothing else to do in it. Each step is asked about once."""
        counts, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
        if counts:  # no other has less than one token
            self._advance += scheduled.total_num_scheduled_tokens - len(counts) + 1
        stirred = self._due and self._due[0][0] <= self._advance and self._stir(counts)
        state, scheduler = scheduled.kv_connector_block_state, self._scheduler
        if (
            stirred
            or scheduled.scheduled_new_reqs
            or scheduled.finished_req_ids
            or scheduled.preempted_req_ids
            or cached.resumed_req_ids
            or scheduled.kv_cache_block_copies
            or (state is not None and state.boundary_state_offloads)
            or scheduler._current_batch_load_jobs
            or scheduler._current_batch_jobs_to_flush
            or scheduler._current_batch_allocated_block_ids
            or not counts.keys().isdisjoint(self._awake)
            or getattr(scheduler, "_step_region", None) is not None  # 0.33's, until it is told
        ):
            return False
        stored_from = scheduler._block_id_to_pending_jobs
        handed_over = (stored_from or self._growing) and any(cached.new_block_ids)
        if stored_from and (handed_over or given is None or given.any):
            return False  # they may be blocks that are being stored from
        if handed_over:
            if self._windowed:
                return False  # they may have left a window before they were stored
            self._take_over(cached)
        if given is not None:
            given.forget()
        return True

    def _stir(self, counts: dict[str, int]) -> bool:
        """Look at those that may have enough tokens after this step; whether any of them has."""
        stirred = False
        while self._due and self._due[0][0] <= self._advance:
            _, name = heapq.heappop(self._due)
            status = self._scheduler._req_status.get(name)
            until = self._until.get(name, math.inf)
            if status is None or until == math.inf:
                continue
            count = counts.get(name, 0)
            lacking = int(until) - status.req.num_computed_tokens - count
            if lacking > 0 or not count:
                heapq.heappush(self._due, (self._advance + max(1, lacking), name))
            else:
                del self._until[name]
                stirred = True
        return stirred

    def _take_over(self, cached: Any) -> None:
        """Note the new blocks of requests that rest, as vLLM would."""
        new = cached.new_block_ids
        for name, blocks in compress(zip(cached.req_ids, new, strict=True), new):
            status = self._scheduler._req_status.get(name) if name in self._growing else None
            if status is not None:
                status.update_block_id_groups(blocks)

    def leave_out(self, scheduled: Any) -> Any:
        """A step's output without those that will not have enough tokens after it; but with what
        it says of their blocks."""
        return self._without(scheduled) or scheduled

    @guarded(lambda: None)
    def _without(self, scheduled: Any) -> Any:
        cached, until = scheduled.scheduled_cached_reqs, self._until
        for name in (
            *(new.req_id for new in scheduled.scheduled_new_reqs),
            *cached.resumed_req_ids,
        ):
            self.forget(name)
        counts = scheduled.num_scheduled_tokens
        if until.keys().isdisjoint(counts):
            return None
        told = [
            (name, blocks)
            for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if name not in until or (blocks and name in self._growing)
        ]
        return dataclasses.replace(
            scheduled,
            num_scheduled_tokens={name: n for name, n in counts.items() if name not in until},
            scheduled_cached_reqs=dataclasses.replace(
                cached,  # of which no more than this is looked at
                req_ids=[name for name, _ in told],
                new_block_ids=[blocks for _, blocks in told],
            ),
        )

    @guarded(lambda: None)
    def looked_at(self, scheduled: Any) -> None:
        """All that there was to be stored of these requests is on its way."""
        self._awake.update(scheduled.num_scheduled_tokens)  # those to whom this loop does not come
        for name, count in scheduled.num_scheduled_tokens.items():
            self.forget(name)
            status = self._scheduler._req_status.get(name)
            if status is None:
                continue
            until = self._until[name] = self._next(status)
            if until < math.inf:
                lacking = int(until) - status.req.num_computed_tokens - count
                heapq.heappush(self._due, (self._advance + max(1, lacking), name))
                self._growing.add(name)

    def _next(self, status: Any) -> float:
        """With how many tokens the next chunk of a request will be whole."""
        config = self._scheduler.config
        most = math.inf if status.max_offload_tokens is None else status.max_offload_tokens
        if config.offload_prompt_only:
            most = min(most, status.req.num_prompt_tokens)
        groups = zip(config.kv_group_configs, status.group_states, strict=True)
        tokens = min(
            (state.next_stored_chunk_idx + 1) * group.tokens_per_chunk for group, state in groups
        )
        return tokens if tokens <= most else math.inf

    def forget(self, request: str) -> None:
        """It has ended, or is to begin anew."""
        self._until.pop(request, None)
        self._growing.discard(request)
        self._awake.discard(request)

    def wake(self, request: str) -> None:
        """What it has stored is to be stored again, though it may go on."""
        self.forget(request)
        status = self._scheduler._req_status.get(request)
        if status is not None and not status.req.is_finished():
            self._awake.add(request)

    def wake_all(self) -> None:
        """What was stored is gone."""
        self._awake.update(self._until)
        self._until.clear()
        self._growing.clear()
