"""Replay a trace of requests against a policy: what would a tier of so many blocks have served?

The metric is prefix hits: of a request's blocks, in order, those that are resident up to the first
that is not. A request is told to the policy as a tier tells it, in two calls: its hits when it is
looked up, its new blocks when they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
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
) -> Result:
    """Run a trace through a tier of `capacity` blocks that evicts by this policy (a new one).

    Blocks of a request beyond the capacity are not stored. Requests before `count_from` only warm
    the tier up.
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
        if not stored:
            continue
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
    return Result(references, hits, evictions)
