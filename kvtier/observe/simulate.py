"""What a stack would have served of a trace of requests: hits by tier, bytes moved, wear.

Every tier has a real eviction policy and is told of requests as a running stack tells it. What is
left out is time: a store or load is done before the next request comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvtier.core.eviction import UNKNOWN, EvictionPolicy, create_policy
from kvtier.core.eviction.trace import Request
from kvtier.core.links import Touches
from kvtier.core.settings import Admission, WritePolicy
from kvtier.types import BlockKey


class TierPlan(msgspec.Struct, frozen=True):
    """One tier of the simulated stack; capacity in blocks of the trace."""

    kind: str
    blocks: int
    eviction: str
    write: WritePolicy
    admission: Admission


class TierResult(msgspec.Struct):
    """What one tier did, in blocks of the trace."""

    kind: str
    blocks: int
    hits: int = 0
    """Blocks served from here because no tier above had them."""
    written: int = 0
    evicted: int = 0


class Simulation(msgspec.Struct):
    """What a stack did with a trace."""

    requests: int
    references: int
    seconds: float
    tiers: list[TierResult]

    @property
    def hits(self) -> int:
        return sum(tier.hits for tier in self.tiers)


class _Tier:
    """The catalogue of one simulated tier."""

    def __init__(self, plan: TierPlan) -> None:
        self.plan = plan
        self.result = TierResult(plan.kind, plan.blocks)
        self.slot_of: dict[int, int] = {}
        self._block_at = [0] * plan.blocks
        self._free = list(range(plan.blocks - 1, -1, -1))
        self._policy: EvictionPolicy = create_policy(plan.eviction, plan.blocks)
        second = plan.admission is Admission.SECOND_TOUCH
        self._touches = Touches() if second else None

    def hit(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here."""
        slot_of = self.slot_of
        for count, block in enumerate(blocks):
            if block not in slot_of:
                return count
        return len(blocks)

    def request(self, time: float, blocks: Sequence[int], names: Mapping[int, bytes]) -> list[int]:
        """Use what is here, and take in what is new if it comes this way; what was evicted."""
        count = self.hit(blocks)
        slots = [self.slot_of[block] for block in blocks[:count]]
        keys = [names[block] for block in blocks]
        wanted = self._admitted(blocks, keys)[count:]
        if self.plan.write is not WritePolicy.THROUGH:
            wanted = [block for block in wanted if block in self.slot_of]
        wanted = wanted[: max(0, self.plan.blocks - count)]
        if slots:
            self._policy.use(slots, keys[:count], time, ahead=len(wanted))
        if not wanted:
            return []
        after = slots[-1] if slots else UNKNOWN
        return self.take(time, wanted, names, after, {*slots})

    def _admitted(self, blocks: Sequence[int], keys: Sequence[bytes]) -> Sequence[int]:
        if self._touches is None:
            return blocks
        again = set(self._touches.note([BlockKey(key) for key in keys]))
        slot_of = self.slot_of
        return [b for b, key in zip(blocks, keys, strict=True) if key in again or b in slot_of]

    def take(
        self,
        time: float,
        blocks: Sequence[int],
        names: Mapping[int, bytes],
        after: int = UNKNOWN,
        pinned: set[int] | None = None,
    ) -> list[int]:
        """Store blocks, those that are here already used; what had to go for them."""
        slot_of, block_at = self.slot_of, self._block_at
        blocks = blocks[: self.plan.blocks]
        held = [slot_of[block] for block in blocks if block in slot_of]
        missing = len(blocks) - len(held) - len(self._free)
        gone: list[int] = []
        if missing > 0:
            freed = self._policy.evict(missing, {*(pinned or ()), *held})
            gone = [block_at[slot] for slot in freed]
            for block in gone:
                del slot_of[block]
            self._free += freed
            self.result.evicted += len(freed)
        landed = []
        for block in blocks:
            slot = slot_of.get(block, UNKNOWN)
            if slot == UNKNOWN:
                if not self._free:
                    break
                slot = self._free.pop()
                slot_of[block] = slot
                block_at[slot] = block
                self.result.written += 1
            landed.append(slot)
        keys = [names[block] for block in blocks[: len(landed)]]
        self._policy.use(landed, keys, time, after=after)
        return gone


def simulate(requests: Sequence[Request], plans: Sequence[TierPlan]) -> Simulation:
    """Run a trace through a stack of these tiers, the first of which is host memory."""
    tiers = [_Tier(plan) for plan in plans if plan.blocks > 0]
    names = {block: block.to_bytes(8, "big") for request in requests for block in request.blocks}
    references = 0
    for time, blocks in requests:
        references += len(blocks)
        _count_hits(tiers, blocks)
        above: list[int] = []
        for index, tier in enumerate(tiers):
            gone = tier.request(time, blocks, names)
            if index and above and tier.plan.write is WritePolicy.ON_EVICT:
                gone += tier.take(time, [b for b in above if b not in tier.slot_of], names)
            if tier.plan.write is not WritePolicy.NEVER:
                above = gone
    seconds = requests[-1].time - requests[0].time if requests else 0.0
    return Simulation(len(requests), references, seconds, [tier.result for tier in tiers])


def _count_hits(tiers: Sequence[_Tier], blocks: Sequence[int]) -> None:
    """Of the longest prefix that the tiers hold together, who serves which block."""
    start = 0
    first = tiers[0].hit(blocks) if tiers else 0
    if tiers:
        tiers[0].result.hits += first
    start = first
    for block in blocks[start:]:
        for tier in tiers:
            if block in tier.slot_of:
                tier.result.hits += 1
                break
        else:
            return
