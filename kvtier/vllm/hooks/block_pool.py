"""vLLM's `BlockPool`: which blocks a step gives out to be written to.

- What is still to be copied out of such a block must leave it before, or is lost. vLLM's connector
  counts all blocks of each request that a step begins, also those that it found in the engine's own
  cache and shares with others, to which nobody writes. Where many prompts begin alike, stores would
  be waited for, or dropped, for nothing. And of a request that has ended it may store blocks of a
  window that were given out long ago.
- vLLM enters blocks into its own cache as soon as a request is scheduled to compute them. If the
  request is preempted for one of higher priority in the same step, it computes nothing. Others
  would find its blocks, and what they compute from these would be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtier.guard import guarded


class AllocatedBlocks:
    """Notes what the engine's pool of blocks gives out, until a step is told of it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._taken: list[Any] = []
        """Lists of blocks, as the pool gave them out."""
        self._cached: list[tuple[Callable[..., dict[int, str]], Any, Any]] = []
        """What the engine has entered into its cache since, in order, as the arguments of the
        calls: there may be hundreds in a step, and they are hardly ever looked at."""
        take, taken = pool.get_new_blocks, self._taken.append

        def get_new_blocks(*arguments: Any, **named: Any) -> Any:
            blocks = take(*arguments, **named)
            taken(blocks)
            return blocks

        pool.get_new_blocks = get_new_blocks
        pool.cache_full_blocks = self._noted(pool.cache_full_blocks, _full_blocks)
        pool.cache_partial_block = self._noted(pool.cache_partial_block, _tail)

    def _noted(
        self, cache: Callable[..., Any], read: Callable[..., dict[int, str]]
    ) -> Callable[..., Any]:
        note = self._cached.append

        def noted(*arguments: Any, **named: Any) -> Any:
            cached = cache(*arguments, **named)
            note((read, arguments, named))
            return cached

        return noted

    @property
    def any(self) -> bool:
        """Whether a step gives out blocks."""
        return bool(self._taken)

    def forget(self) -> None:
        """A step was looked at."""
        self._taken.clear()
        self._cached.clear()

    @guarded(lambda: None)
    def _forget_uncomputed(self, scheduled: Any) -> None:
        """Evict from the engine's cache what requests were to compute that were preempted since."""
        gone = (scheduled.preempted_req_ids or set()) - scheduled.num_scheduled_tokens.keys()
        if gone:
            last: dict[int, str] = {}  # the blocks of a preempted request may be another's by now
            for read, arguments, named in self._cached:
                last.update(read(*arguments, **named))
            self._pool.evict_blocks({block for block, name in last.items() if name in gone})

    def tell(self, scheduler: Any, scheduled: Any) -> None:
        """State, before vLLM's side looks at a step's output, the blocks that are written to: what
        the pool has given out, and what running requests got beside that (blocks of their own that
        they use anew, and copies)."""
        self._forget_uncomputed(scheduled)
        given = {block.block_id for blocks in self._taken for block in blocks}
        self.forget()
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


def _full_blocks(
    request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *_: Any, **__: Any
) -> dict[int, str]:
    full = blocks[num_cached_blocks:num_full_blocks]
    return {each.block_id: request.request_id for each in full}


def _tail(request: Any, block: Any, *_: Any, **__: Any) -> dict[int, str]:
    return {block.block_id: request.request_id}


def _forget_passed(config: Any, status: Any) -> None:
    """Leave out of a request's end what was passed over of its windows. vLLM looks at that again
    where windows are kept densely, and notices only of later blocks when others get them."""
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
