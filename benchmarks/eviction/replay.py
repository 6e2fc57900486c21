"""Replay a trace of requests against a policy: what would a tier of so many blocks have served?

The metric is prefix hits: of a request's blocks, in order, those that are resident up to the first
that is not. A request is told to the policy as a tier tells it, in two calls: its hits when it is
looked up, its new blocks when they are stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtier.cli.trace_simulation import Request
from kvtier.eviction.policy import UNKNOWN, EvictionPolicy


class Result(NamedTuple):
    """What a replay counted, over the requests from `count_from` on."""

    references: int
    hits: int
    evictions: int

    @property
    def percent(self) -> float:
        """Hits in percent of all block references."""
        return 100.0 * self.hits / self.references if self.references else 0.0


def block_keys(requests: Sequence[Request]) -> dict[int, bytes]:
    """A key for every block of a trace: the policies take keys as a tier has them."""
    return {block: block.to_bytes(8, "big") for request in requests for block in request.blocks}


def replay(
    requests: Sequence[Request],
    policy: EvictionPolicy,
    capacity: int,
    count_from: int = 0,
    keys: dict[int, bytes] | None = None,
    served: Callable[[int, Mapping[int, int]], None] = lambda number, slot_of: None,
) -> Result:
    """Run a trace through a tier of `capacity` blocks that evicts by this policy (a new one).

    Blocks of a request beyond the capacity are not stored. Requests before `count_from` only warm
    the tier up. `served` is told each request's number after it, and where all blocks are then.
    """
    if capacity < 1:
        raise ValueError("the capacity must be at least one block")
    policy.resize(capacity)
    names = block_keys(requests) if keys is None else keys
    slot_of: dict[int, int] = {}
    block_at = [0] * capacity
    free = list(range(capacity - 1, -1, -1))
    references = hits = evictions = 0
    for number, (time, blocks) in enumerate(requests):
        slots: list[int] = []
        for block in blocks:
            slot = slot_of.get(block, UNKNOWN)
            if slot == UNKNOWN:
                break
            slots.append(slot)
        hit = len(slots)
        if number >= count_from:
            references += len(blocks)
            hits += hit
        stored = blocks[hit:capacity]
        request_keys = [names[block] for block in blocks[:capacity]]
        if hit:
            policy.use(slots, request_keys[:hit], time, ahead=len(stored))
        if stored:
            after = slots[-1] if slots else UNKNOWN
            held = [slot_of[block] for block in stored if block in slot_of]
            missing = len(stored) - len(held) - len(free)
            if missing > 0:
                evicted = policy.evict(missing, {*slots, *held})
                evictions += len(evicted)
                for slot in evicted:
                    del slot_of[block_at[slot]]
                free += evicted
            landed: list[int] = []
            for block in stored:
                slot = slot_of.get(block, UNKNOWN)
                if slot == UNKNOWN:
                    slot = free.pop()
                    slot_of[block] = slot
                    block_at[slot] = block
                landed.append(slot)
            policy.use(landed, request_keys[hit:], time, after=after)
        served(number, slot_of)
    return Result(references, hits, evictions)


def replay_belady(requests: Sequence[Request], capacity: int, count_from: int = 0) -> Result:
    """Replay with Belady's choice: the block whose next use is farthest goes (of one request's
    blocks the deepest), and a block that is used sooner than none of the others is not kept."""
    never = len(requests)
    upcoming: dict[int, int] = {}
    next_uses: list[tuple[int, ...]] = [()] * len(requests)
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        next_uses[number] = tuple(upcoming.get(block, never) for block in blocks)
        upcoming.update(dict.fromkeys(blocks, number))
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    references = hits = evictions = 0
    for number, (_, blocks) in enumerate(requests):
        if number >= count_from:
            references += len(blocks)
            for block in blocks:
                if block not in kept:
                    break
                hits += 1
        for depth in range(len(blocks) - 1, -1, -1):
            block, again = blocks[depth], next_uses[number][depth]
            if block not in kept and again == never:
                continue
            if block not in kept and len(kept) >= capacity:
                while kept.get(farthest[0][2]) != -farthest[0][0]:
                    heapq.heappop(farthest)  # used since, or gone
                if farthest[0] >= (-again, -depth, block):
                    continue
                del kept[heapq.heappop(farthest)[2]]
                evictions += 1
            kept[block] = again
            heapq.heappush(farthest, (-again, -depth, block))
    return Result(references, hits, evictions)
