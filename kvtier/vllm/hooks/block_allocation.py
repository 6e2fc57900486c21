"""Which blocks a step of the engine gives out to be written to.

What is still to be copied out of such a block must have left it before, or is lost. vLLM's
connector counts all blocks of each request that a step begins, those too that it has found in the
engine's own cache and shares with others, to which nobody writes: stores would be waited for, or
dropped, for nothing, wherever many prompts begin alike. And of a request that has ended it may
store a window's blocks that were given out long ago.

And vLLM takes blocks for computed, in its own cache, as soon as a request is to compute them. One
that makes way in the same step for another, because of its priority, computes nothing: its blocks
would be found by those who come, and what they compute from them be kept.
"""

from __future__ import annotations

from typing import Any

from kvtier.vllm.guard import guarded


class AllocatedBlocks:
    """Notes what the engine's pool of blocks gives out, until a step is told of it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._blocks: set[int] = set()
        self._cached: dict[int, str] = {}
        """What the engine has taken for computed since, and the request that was to do it last: one
        that makes way gives its blocks to the other in the same step."""
        take, cache = pool.get_new_blocks, pool.cache_full_blocks

        def get_new_blocks(*arguments: Any, **named: Any) -> Any:
            blocks = take(*arguments, **named)
            self._blocks.update(block.block_id for block in blocks)
            return blocks

        def cache_full_blocks(*arguments: Any, **named: Any) -> None:
            cache(*arguments, **named)
            self._note(*arguments, **named)

        pool.get_new_blocks, pool.cache_full_blocks = get_new_blocks, cache_full_blocks
        if hasattr(pool, "cache_partial_block"):  # not in all versions
            self._watch_tails(pool)

    def _watch_tails(self, pool: Any) -> None:
        cache = pool.cache_partial_block

        def cache_partial_block(*arguments: Any, **named: Any) -> Any:
            cached = cache(*arguments, **named)
            self._note_tail(*arguments, **named)
            return cached

        pool.cache_partial_block = cache_partial_block

    @guarded(lambda: None)
    def _note_tail(self, request: Any, block: Any, *_: Any, **__: Any) -> None:
        self._cached[block.block_id] = request.request_id

    @guarded(lambda: None)
    def _note(
        self,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        *_: Any,
        **__: Any,
    ) -> None:
        full = blocks[num_cached_blocks:num_full_blocks]
        self._cached.update((each.block_id, request.request_id) for each in full)

    @guarded(lambda: None)
    def _forget_uncomputed(self, scheduled: Any) -> None:
        """Let nobody find what requests were to compute that have made way for others since."""
        cached, self._cached = self._cached, {}
        gone = (scheduled.preempted_req_ids or set()) - scheduled.num_scheduled_tokens.keys()
        if gone:
            self._pool.evict_blocks({block for block, name in cached.items() if name in gone})

    def tell(self, scheduler: Any, scheduled: Any) -> None:
        """Let vLLM's side know, as it is about to look at a step's output, what it then finds out
        for itself: what the pool has given, and what running requests have got beside that (blocks
        of their own that they use anew, and copies)."""
        self._forget_uncomputed(scheduled)
        given, self._blocks = self._blocks, set()
        cached = scheduled.scheduled_cached_reqs
        for name, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups and name not in cached.resumed_req_ids:
                given.update(*groups)
        given.update(copy.dst_block_id for copy in scheduled.kv_cache_block_copies or ())
        given.discard(0)
        scheduler._current_batch_allocated_block_ids = _Told(given)
        for name in scheduled.finished_req_ids or ():
            if (status := scheduler._req_status.get(name)) is not None:
                _forget_passed(scheduler.config, status)


def _forget_passed(config: Any, status: Any) -> None:
    """Let what was passed over of a request's windows not be looked at again at its end, as vLLM
    does where windows are kept densely: it notices of the blocks behind that alone when they are
    given to others."""
    for group, state in zip(config.kv_group_configs, status.group_states, strict=True):
        if group.sliding_window_size_in_chunks is not None:
            passed = state.block_ids[: state.next_stored_chunk_idx * config.blocks_per_chunk]
            state.block_ids[: len(passed)] = [0] * len(passed)


class _Told(set[int]):
    """A set that vLLM adds nothing to."""

    def add(self, element: int, /) -> None:
        """It is there if it belongs there."""

    def update(self, *others: Any) -> None:
        """As above."""
