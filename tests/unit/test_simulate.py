"""Simulating stacks on traces: quick and slow ways agree, on one core and on several."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.eviction import UNKNOWN, create_policy
from kvtier.core.eviction.trace import Request
from kvtier.core.links import Touches
from kvtier.core.settings import Admission, WritePolicy
from kvtier.errors import KVTierError
from kvtier.observe.simulate import TierPlan, simulate, simulate_all
from kvtier.observe.workers import spread
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
                gone += tier.take(time, [each for each in above if each not in tier.slot_of])
            if tier.plan.write is not WritePolicy.NEVER:
                above = gone
    return [Counts(tier.hits, tier.written, tier.evicted) for tier in tiers]


def counts(requests: Sequence[Request], plans: Sequence[TierPlan]) -> list[Counts]:
    found = simulate(requests, plans)
    assert found.references == sum(len(request.blocks) for request in requests)
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


@settings(max_examples=60)
@given(st.integers(0, 1000), st.lists(tiers, min_size=1, max_size=3))
def test_the_slow_way_says_the_same(seed: int, plans: list[TierPlan]) -> None:
    requests = conversations(seed, 120)
    assert counts(requests, plans) == slowly(requests, plans)


def test_a_long_trace_under_the_default_policy() -> None:
    requests = conversations(3, 1500)
    plans = [
        TierPlan("tier", blocks, "adaptive", WritePolicy.THROUGH, Admission.ALWAYS)
        for blocks in (30, 150)
    ]
    assert counts(requests, plans) == slowly(requests, plans)


def test_many_stacks_at_once_are_the_same_as_one_by_one() -> None:
    requests = conversations(5, 300)
    through, evicted = WritePolicy.THROUGH, WritePolicy.ON_EVICT
    stacks = [
        [
            TierPlan("above", blocks, "adaptive", through, Admission.ALWAYS),
            TierPlan("below", 3 * blocks, "lru", write, Admission.ALWAYS),
        ]
        for blocks in (5, 20, 40)
        for write in (through, evicted)
    ]
    told: list[int] = []
    together = simulate_all(requests, stacks, told.append)
    assert together == [simulate(requests, plans) for plans in stacks]
    assert sum(told) == 2 * len(stacks)


def test_no_requests() -> None:
    plans = [TierPlan("tier", 4, "lru", WritePolicy.THROUGH, Admission.ALWAYS)]
    assert counts([], plans) == [Counts(0, 0, 0)]


class TestWorkers:
    @pytest.fixture(autouse=True, params=[1, 4])
    def cores(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
        cores: int = request.param
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        return cores

    def test_every_answer_with_its_task(self) -> None:
        found = dict(spread(lambda task: task * 2, list(range(20)), int))
        assert found == {number: 2 * number for number in range(20)}

    def test_large_answers(self) -> None:
        found = dict(spread(lambda task: bytes([task]) * (3 << 20), [1, 2, 3], bytes))
        assert all(found[at] == bytes([at + 1]) * (3 << 20) for at in range(3))

    def test_they_work_in_processes_of_their_own(self, cores: int) -> None:
        pids = {pid for _, pid in spread(lambda task: os.getpid(), [1, 2, 3], int)}
        assert pids == {os.getpid()} if cores == 1 else os.getpid() not in pids

    def test_whoever_stops_listening_leaves_nobody_behind(
        self, cores: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forked: list[int] = []
        fork = os.fork

        def remembered() -> int:
            forked.append(fork())
            return forked[-1]

        monkeypatch.setattr(os, "fork", remembered)
        answers = spread(lambda task: task, list(range(8)), int)
        next(answers)
        answers.close()  # type: ignore[attr-defined]
        assert bool(forked) == (cores > 1)
        for pid in forked:
            with pytest.raises(ChildProcessError):  # it has ended and was waited for
                os.waitpid(pid, os.WNOHANG)


def test_a_worker_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(KVTierError, match="status -9"):
        list(spread(lambda task: os.kill(os.getpid(), 9), [1, 2], type(None)))
