"""Which blocks vLLM's side is told to be written to in a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtier.vllm.hooks.block_pool import AllocatedBlocks


class Pool:
    """Gives out blocks by their numbers, the next ones each time."""

    def __init__(self) -> None:
        self.given = 0
        self.cached: set[int] = set()

    def get_new_blocks(self, count: int) -> list[Any]:
        first, self.given = self.given + 1, self.given + count
        return [SimpleNamespace(block_id=block) for block in range(first, self.given + 1)]

    def cache_full_blocks(
        self, request: Any, blocks: list[Any], num_cached_blocks: int, num_full_blocks: int
    ) -> None:
        self.cached |= {each.block_id for each in blocks[num_cached_blocks:num_full_blocks]}

    def cache_partial_block(self, request: Any, block: Any, num_tokens: int) -> str:
        self.cached.add(block.block_id)
        return f"hash of {num_tokens}"

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.cached -= block_ids


def told(
    given: AllocatedBlocks,
    cached: dict[str, tuple[list[int], ...] | None] | None = None,
    resumed: set[str] | None = None,
    copies: list[int] | None = None,
    preempted: set[str] | None = None,
) -> set[int]:
    """What vLLM's side knows of a step, after it has looked at all blocks of those it begins."""
    cached = cached or {}
    scheduled = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=list(cached.values()),
            resumed_req_ids=resumed or set(),
        ),
        finished_req_ids=set(),
        preempted_req_ids=preempted,
        num_scheduled_tokens=dict.fromkeys(cached, 1),
        kv_cache_block_copies=copies and [SimpleNamespace(dst_block_id=block) for block in copies],
    )
    scheduler: Any = SimpleNamespace()
    given.tell(scheduler, scheduled)
    blocks: set[int] = scheduler._current_batch_allocated_block_ids
    blocks.add(1000)
    blocks.update({1001}, [1002])
    return set(blocks)


def test_what_the_pool_gives_out_is_told_once() -> None:
    """And not what is shared, of which vLLM would tell itself."""
    pool = Pool()
    given = AllocatedBlocks(pool)
    assert told(given) == set()
    assert [block.block_id for block in pool.get_new_blocks(2)] == [1, 2]
    pool.get_new_blocks(count=1)
    assert given.any
    assert told(given) == {1, 2, 3}
    assert told(given) == set()
    assert not given.any
    pool.get_new_blocks(1)
    given.forget()
    assert told(given) == set()


def test_blocks_that_running_requests_use_anew_are_told() -> None:
    """0 is no block, but says that there is none."""
    running = {"a": ([7, 8], [0, 9]), "b": None, "c": ([], [10])}
    assert told(AllocatedBlocks(Pool()), running) == {7, 8, 9, 10}


def test_a_request_that_goes_on_after_a_preemption_names_all_its_blocks() -> None:
    """Of which it shares some; those that are given to it the pool has told of."""
    pool = Pool()
    given = AllocatedBlocks(pool)
    pool.get_new_blocks(1)
    assert told(given, {"a": ([7, 1],), "b": ([8],)}, resumed={"a"}) == {1, 8}


def test_targets_of_copies_are_told() -> None:
    assert told(AllocatedBlocks(Pool()), copies=[5, 6]) == {5, 6}


def test_what_a_request_was_to_compute_that_made_way_is_not_found() -> None:
    """Of two that are to compute their second blocks, one makes way for the other in that step."""
    pool = Pool()
    given = AllocatedBlocks(pool)
    blocks = {name: pool.get_new_blocks(2) for name in ("low", "high")}
    for name, each in blocks.items():
        pool.cache_full_blocks(SimpleNamespace(request_id=name), each, 0, 1)
    told(given, {"low": None, "high": None})
    for name, each in blocks.items():
        pool.cache_full_blocks(
            request=SimpleNamespace(request_id=name),
            blocks=each,
            num_cached_blocks=1,
            num_full_blocks=2,
        )
    told(given, {"high": None}, preempted={"low"})
    assert pool.cached == {1, 3, 4}


def test_what_another_computes_in_the_blocks_of_one_that_made_way_is_found() -> None:
    """It made way because the other had no blocks, and gives it those of its own in that step."""
    pool = Pool()
    given = AllocatedBlocks(pool)
    low, high = (SimpleNamespace(request_id=name) for name in ("low", "high"))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(low, blocks, 0, 3)
    pool.cached = set()  # as they are given out anew
    pool.cache_full_blocks(high, blocks, 0, 2)
    told(given, {"high": None}, preempted={"low"})
    assert pool.cached == {1, 2}


def test_nor_is_the_end_of_a_prompt_within_a_block() -> None:
    """As with a unit that is smaller than a block."""
    pool = Pool()
    given = AllocatedBlocks(pool)
    low, high = (SimpleNamespace(request_id=name) for name in ("low", "high"))
    [one, other] = pool.get_new_blocks(2)
    assert pool.cache_partial_block(low, block=one, num_tokens=8) == "hash of 8"
    pool.cache_partial_block(high, block=other, num_tokens=8)
    told(given, {"high": None}, preempted={"low"})
    assert pool.cached == {2}


def test_what_one_computes_that_goes_on_in_the_step_that_preempted_it_is_found() -> None:
    pool = Pool()
    given = AllocatedBlocks(pool)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(SimpleNamespace(request_id="a"), blocks, 0, 1)
    told(given, {"a": ([1],)}, resumed={"a"}, preempted={"a"})
    assert pool.cached == {1}
