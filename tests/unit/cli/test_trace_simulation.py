"""Simulating stacks on traces: the quick way and a slow one agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.chain.store import Touches
from kvtier.cli.trace_simulation import Request, TierPlan, simulate
from kvtier.eviction import UNKNOWN, create_policy
from kvtier.settings import Admission, WritePolicy
from kvtier.types import BlockKey


class Counts(NamedTuple):
    hits: int
    written: int
    evicted: int


class SlowTier:
    """One tier, block by block, without a thought of time."""

    def __init__(self, plan: TierPlan) -> None:
        self.plan = plan
        self.policy = create_policy(plan.eviction, plan.blocks)
        self.touches = Touches()
        self.block_at: dict[int, int] = {}
        self.free = list(range(plan.blocks - 1, -1, -1))
        self.hits = self.written = self.evicted = 0

    @property
    def slot_of(self) -> dict[int, int]:
        return {block: slot for slot, block in self.block_at.items()}

    def request(self, time: float, blocks: Sequence[int]) -> list[int]:
        slot_of = self.slot_of
        count = next((i for i, each in enumerate(blocks) if each not in slot_of), len(blocks))
        hits = [slot_of[block] for block in blocks[:count]]
        wanted = list(blocks)
        if self.plan.admission is Admission.SECOND_TOUCH:
            again = self.touches.note([BlockKey(name(block)) for block in blocks])
            wanted = [each for each in blocks if name(each) in again or each in slot_of]
        wanted = wanted[count:]
        if self.plan.write is not WritePolicy.THROUGH:
            wanted = [block for block in wanted if block in slot_of]
        wanted = wanted[: max(0, self.plan.blocks - count)]
        if hits:
            keys = [name(block) for block in blocks[:count]]
            self.policy.use(hits, keys, time, ahead=len(wanted))
        return self.take(time, wanted, hits[-1] if hits else UNKNOWN, hits) if wanted else []

    def catches(self, block: int) -> bool:
        admitted = self.plan.admission is Admission.ALWAYS or bool(
            self.touches.twice([BlockKey(name(block))])
        )
        return admitted and block not in self.slot_of

    def take(
        self, time: float, blocks: Sequence[int], after: int = UNKNOWN, pinned: Sequence[int] = ()
    ) -> list[int]:
        blocks = blocks[: self.plan.blocks]
        held = [self.slot_of[block] for block in blocks if block in self.slot_of]
        gone = []
        if (missing := len(blocks) - len(held) - len(self.free)) > 0:
            slots = self.policy.victims(missing, {*pinned, *held})
            self.policy.remove(slots)
            gone = [self.block_at.pop(slot) for slot in slots]
            self.free += slots
            self.evicted += len(slots)
        landed = []
        for block in blocks:
            if block not in self.slot_of:
                if not self.free:
                    break
                self.block_at[self.free.pop()] = block
                self.written += 1
            landed.append(self.slot_of[block])
        keys = [name(block) for block in blocks[: len(landed)]]
        self.policy.use(landed, keys, time, after=after)
        return gone


def name(block: int) -> bytes:
    return block.to_bytes(8, "big")


def slowly(requests: Sequence[Request], plans: Sequence[TierPlan]) -> list[Counts]:
    tiers = [SlowTier(plan) for plan in plans]
    for time, blocks in requests:
        for block in blocks:
            having = next((tier for tier in tiers if block in tier.slot_of), None)
            if having is None:
                break
            having.hits += 1
        above: list[int] = []
        for tier in tiers:
            gone = tier.request(time, blocks)
            if tier is not tiers[0] and above and tier.plan.write is WritePolicy.ON_EVICT:
                gone += tier.take(time, [each for each in above if tier.catches(each)])
            if tier.plan.write is not WritePolicy.NEVER:
                above = gone
    return [Counts(tier.hits, tier.written, tier.evicted) for tier in tiers]


def counts(requests: Sequence[Request], plans: Sequence[TierPlan]) -> list[Counts]:
    found = simulate(requests, plans)
    assert found.references == sum(len(request.blocks) for request in requests)
    assert found.hits == sum(tier.hits for tier in found.tiers)
    return [Counts(tier.hits, tier.written, tier.evicted) for tier in found.tiers]


def conversations(seed: int, requests: int) -> list[Request]:
    """Prefixes that grow, fork, come back and are cut short."""
    dice = random.Random(seed)
    talks = [[0, *range(100 * talk + 1, 100 * talk + 1 + dice.randrange(8))] for talk in range(9)]
    fresh = iter(range(10_000, 10_000_000))
    found = []
    for number in range(requests):
        talk = dice.choice(talks)
        if dice.random() < 0.2:
            del talk[dice.randrange(1, len(talk) + 1) :]
        talk += [next(fresh) for _ in range(dice.randrange(5))]
        found.append(Request(float(number), tuple(talk)))
    return found


tiers = st.builds(
    TierPlan,
    kind=st.just("tier"),
    blocks=st.integers(1, 60),
    eviction=st.sampled_from(["adaptive", "lru"]),
    write=st.sampled_from(WritePolicy),
    admission=st.sampled_from(Admission),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 1000), st.lists(tiers, min_size=1, max_size=3))
def test_the_slow_way_says_the_same(seed: int, plans: list[TierPlan]) -> None:
    requests = conversations(seed, 120)
    assert counts(requests, plans) == slowly(requests, plans)


def test_what_was_used_once_does_not_come_down_to_a_tier_that_takes_it_the_second_time() -> None:
    plans = [
        TierPlan("above", 2, "lru", WritePolicy.THROUGH, Admission.ALWAYS),
        TierPlan("below", 9, "lru", WritePolicy.ON_EVICT, Admission.SECOND_TOUCH),
    ]
    once = [Request(float(block), (block,)) for block in range(6)]
    assert simulate(once, plans).tiers[1].written == 0
    twice = [Request(float(at), (at // 2,)) for at in range(12)]
    assert simulate(twice, plans).tiers[1].written == 4


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.ON_EVICT])
@pytest.mark.parametrize("between", [(), (WritePolicy.NEVER,)])
def test_uses_are_remembered_for_as_many_blocks_as_the_tier_above_holds(
    write: WritePolicy, between: tuple[WritePolicy, ...]
) -> None:
    """As by a running stack."""
    above = TierPlan("above", 6, "lru", WritePolicy.THROUGH, Admission.ALWAYS)
    read = [TierPlan("read", 1, "lru", each, Admission.ALWAYS) for each in between]
    below = TierPlan("below", 9, "lru", write, Admission.SECOND_TOUCH, remembers=2)
    order = [*range(8), 0, *range(10, 16)]
    requests = [Request(float(at), (block,)) for at, block in enumerate(order)]
    assert simulate(requests, [above, *read, below]).tiers[-1].written == 1


@pytest.mark.slow
def test_a_long_trace_under_the_default_policy() -> None:
    requests = conversations(3, 1500)
    plans = [
        TierPlan("tier", blocks, "adaptive", WritePolicy.THROUGH, Admission.ALWAYS)
        for blocks in (30, 150)
    ]
    assert counts(requests, plans) == slowly(requests, plans)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_tier_that_holds_everything(spare: int) -> None:
    requests = conversations(8, 200)
    distinct = len({block for request in requests for block in request.blocks})
    for blocks in (20, distinct + spare):
        plans = [
            TierPlan("tier", each, "adaptive", WritePolicy.THROUGH, Admission.ALWAYS)
            for each in (blocks, distinct + spare)
        ]
        assert counts(requests, plans) == slowly(requests, plans)


@pytest.mark.parametrize("write", WritePolicy)
def test_a_tier_costs_no_more_than_the_trace_fills(write: WritePolicy) -> None:
    requests = conversations(8, 200)
    distinct = len({block for request in requests for block in request.blocks})
    above = TierPlan("above", 20, "lru", WritePolicy.THROUGH, Admission.ALWAYS)
    all_of_it, endless = (
        TierPlan("below", blocks, "adaptive", write, Admission.SECOND_TOUCH)
        for blocks in (distinct, 1 << 50)
    )
    assert counts(requests, [above, endless]) == counts(requests, [above, all_of_it])


@pytest.mark.parametrize("eviction", ["adaptive", "lru"])
@pytest.mark.parametrize("write", WritePolicy)
def test_a_tier_without_room_is_as_good_as_none(eviction: str, write: WritePolicy) -> None:
    requests = conversations(2, 100)
    above = TierPlan("above", 20, eviction, WritePolicy.THROUGH, Admission.ALWAYS)
    nothing = TierPlan("below", 0, eviction, write, Admission.ALWAYS)
    for plans in ([above, nothing], [nothing, above]):
        found = counts(requests, plans)
        assert found[plans.index(nothing)] == Counts(0, 0, 0)
        assert found[plans.index(above)] == counts(requests, [above])[0]


def test_no_requests() -> None:
    plans = [TierPlan("tier", 4, "lru", WritePolicy.THROUGH, Admission.ALWAYS)]
    assert counts([], plans) == [Counts(0, 0, 0)]
