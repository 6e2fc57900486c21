"""Requests of which nothing can be stored for a while: most of those that decode.

vLLM's scheduler side looks through all requests in each step, which takes some microseconds for
each. A step of hundreds of them is held up by it for a millisecond or two, in which no more than a
few have anything new.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kvtier.vllm.guard import guarded


class IdleRequests:
    """Knows up to how many tokens each request can be left out of what vLLM is told of a step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._until: dict[str, float] = {}

    def leave_out(self, scheduled: Any) -> Any:
        """A step's output without those that will not have enough tokens after it; but with what
        it says of their blocks."""
        return self._without(scheduled) or scheduled

    @guarded(lambda: None)
    def _without(self, scheduled: Any) -> Any:
        cached, counts = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens
        until = self._until
        resting = {
            name
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if computed + counts[name] < until.get(name, 0)
        } - cached.resumed_req_ids
        if not resting:
            return None
        told = [
            (name, blocks)
            for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if blocks is not None or name not in resting
        ]
        return dataclasses.replace(
            scheduled,
            num_scheduled_tokens={name: n for name, n in counts.items() if name not in resting},
            scheduled_cached_reqs=dataclasses.replace(
                cached,  # of which no more than this is looked at
                req_ids=[name for name, _ in told],
                new_block_ids=[blocks for _, blocks in told],
            ),
        )

    @guarded(lambda: None)
    def looked_at(self, scheduled: Any) -> None:
        """All that there was to be stored of these requests is on its way."""
        statuses = self._scheduler._req_status
        for name in scheduled.num_scheduled_tokens:
            if (status := statuses.get(name)) is not None:
                self._until[name] = self._next(status)

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

    def wake(self, request: str) -> None:
        """It begins anew, or has ended."""
        self._until.pop(request, None)

    def wake_all(self) -> None:
        """What was stored is gone."""
        self._until.clear()
