"""The bound that no policy passes: evict what is used again last, knowing the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.eviction.replay import Result
from kvtier.cli.trace_simulation import Request


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
