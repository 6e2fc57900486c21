"""A chain whose lower tier may only be written so much."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers.chains import KEYS, SLOT, ChainRig, rule

from kvtier.chain.admission import DynamicAdmission, EarnedHits, kind_of
from kvtier.interfaces.write_budget import TokenBucket, WriteAllowance
from kvtier.settings import WritePolicy
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey

FAR = 1e12


def rig_with(shared: float, lease: float, write: WritePolicy = WritePolicy.THROUGH) -> ChainRig:
    rig = ChainRig([16, 64], [rule(), rule(write=write)])
    allowance = WriteAllowance(1.0, FAR, SLOT)
    allowance.tell(shared, 0.0, 0.0)
    allowance.grant(lease)
    rig.tiers[1].allowance = allowance
    rig._begin()
    return rig


def allowance_of(rig: ChainRig) -> WriteAllowance:
    assert rig.tiers[1].allowance is not None
    return rig.tiers[1].allowance


def drops(rig: ChainRig) -> dict[str, int]:
    return rig.chain.chain_stats().links[0].drops


def test_with_room_for_all_it_is_written_through() -> None:
    rig = rig_with(FAR, FAR)
    rig.chain.touch(KEYS[:8])
    rig.store(KEYS[:8])
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]
    assert drops(rig) == {}


def test_with_nothing_left_nothing_is_written_and_nobody_waits() -> None:
    rig = rig_with(0.0, 0.0)
    rig.store(KEYS[:8])
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == []
    assert drops(rig) == {"budget": 8}
    assert not rig.chain.has_pending_work


def test_what_was_chosen_waits_for_its_lease() -> None:
    rig = rig_with(FAR, 3 * SLOT)
    calls: list[int] = []
    allowance_of(rig).when_short = lambda: calls.append(1)
    rig.store(KEYS[:8])
    rig.chain.poll()
    assert [len(transfer.keys) for transfer in rig.mover.stores()] == [3]
    assert calls == [1]
    assert rig.chain.has_pending_work
    assert allowance_of(rig).take_wanted() >= 8 * SLOT
    allowance_of(rig).grant(5 * SLOT)
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]
    assert not rig.chain.has_pending_work


def test_an_idle_engine_does_not_step_for_a_budget_that_others_have_used_up() -> None:
    rig = rig_with(FAR, 0.0)
    rig.store(KEYS[:8])
    rig.chain.poll()
    allowance_of(rig).tell(0.0, 0.0, 0.0)
    assert not rig.chain.has_pending_work
    allowance_of(rig).grant(FAR)
    assert rig.chain.has_pending_work
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]


def test_each_use_is_one_more_chance() -> None:
    rig = rig_with(0.0, 0.0)
    rig.store(KEYS[:4])
    rig.settle()
    allowance_of(rig).grant(FAR)
    rig.now += 2.0
    rig.chain.touch(KEYS[:4])
    rig.settle()
    assert rig.resident(1, KEYS[:4]) == KEYS[:4]


def test_what_is_evicted_is_written_within_it_too() -> None:
    kept = []
    for lease in (None, FAR, 0.0):
        rig = rig_with(0.0, lease or 0.0, WritePolicy.ON_EVICT)
        if lease is None:
            rig.tiers[1].allowance = None
            rig._begin()
        for start in range(0, 24, 4):
            rig.chain.touch(KEYS[start : start + 4])
            rig.store(KEYS[start : start + 4])
            rig.settle()
            rig.now += 2.0
        kept.append(rig.resident(1, KEYS))
        assert not rig.chain.has_pending_work
    assert kept[0] == kept[1] != []
    assert kept[2] == []


def test_what_a_disk_may_not_take_reaches_the_store_below_all_the_same() -> None:
    rig = ChainRig([16, 64, 64])
    rig.tiers[1].allowance = WriteAllowance(1.0, FAR, SLOT)
    rig._begin()
    rig.store(KEYS[:8])
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == []
    assert rig.resident(2, KEYS[:8]) == KEYS[:8]


def test_what_outlived_a_restart_comes_down_within_it() -> None:
    for lease in (FAR, 0.0):
        rig = rig_with(lease, lease)
        rig.put(0, KEYS[:8])
        rig.restart()
        allowance = WriteAllowance(1.0, FAR, SLOT)
        allowance.tell(lease, 0.0, 0.0)
        allowance.grant(lease)
        rig.tiers[1].allowance = allowance
        rig._begin()
        rig.settle()
        assert len(rig.resident(1, KEYS[:8])) == (8 if lease else 0)
        assert not rig.chain.has_pending_work


# -- a long-run rate with bursts, whatever the clock and the callers do


RATE, BURST = 10.0, 3600.0

amounts = st.floats(0, 1e6)
steps = st.lists(
    st.tuples(st.floats(-1e5, 1e5), st.sampled_from(["take", "charge", "put_back"]), amounts),
    max_size=50,
)


@given(steps)
def test_what_is_granted_never_exceeds_rate_and_burst(
    steps: list[tuple[float, str, float]],
) -> None:
    bucket = TokenBucket(RATE, BURST, BURST, 0.0)
    now = passed = spent = 0.0
    for step, what, amount in steps:
        now += step
        passed += max(0.0, step)
        bucket.fill(now)
        if what == "take":
            spent += bucket.take(amount)
        elif what == "charge":
            bucket.charge(amount)
            spent += amount
        elif amount <= spent:
            bucket.put_back(amount)
            spent -= amount
        assert bucket.level <= BURST
    # In floats of this size nothing smaller is certain.
    charged = sum(amount for _, what, amount in steps if what == "charge")
    assert spent <= BURST + RATE * passed + charged + 1e-3


def test_what_was_charged_is_made_up_for() -> None:
    bucket = TokenBucket(RATE, BURST, 0.0, 0.0)
    bucket.charge(100.0)
    bucket.fill(5.0)
    assert bucket.take(50.0) == 0.0
    bucket.fill(15.0)
    assert bucket.take(100.0) == pytest.approx(50.0)


def test_a_clock_that_is_put_back_or_forward_gives_no_more_than_a_burst() -> None:
    bucket = TokenBucket(RATE, BURST, 0.0, 1000.0)
    bucket.fill(0.0)
    assert bucket.level == 0.0
    bucket.fill(1e12)
    assert bucket.take(1e12) == BURST


# -- within a budget those blocks are written that earn the most hits


NOWHERE = [False] * 8


def prompts(count: int, blocks: int = 8, start: int = 0) -> list[list[BlockKey]]:
    keys = make_keys(count * blocks, start=start)
    return [keys[at : at + blocks] for at in range(0, len(keys), blocks)]


def test_what_comes_again_is_written_before_what_is_new() -> None:
    admission = DynamicAdmission(10_000)
    again = prompts(20)
    fresh = iter(prompts(6000, start=1000))
    written = {"again": 0, "fresh": 0}
    for second in range(1500):
        offered = [("again", again[second % 20])] + [("fresh", next(fresh)) for _ in range(4)]
        for name, prompt in offered:
            admission.earned.request(prompt, NOWHERE)
            # Of 40 blocks a second a fifth may be written: a quarter of an hour's worth is left.
            chosen = admission.select(prompt, 8 * 900.0, float(second))
            if second >= 1100:
                written[name] += len(chosen)
    assert written["again"] > 0.9 * 400 * 8
    assert written["fresh"] < 0.1 * 400 * 32


def test_it_learns_that_prompts_of_one_length_come_again() -> None:
    """Short ones do, once each: of those that come for the first time, it writes the short ones."""
    admission = DynamicAdmission(10_000)
    dice = random.Random(1)
    short = prompts(600, 2)
    long = prompts(600, 32, start=100_000)
    written = {2: 0, 32: 0}
    for second in range(600):
        new = [short[second], long[second]]
        old = [short[dice.randrange(second)]] if second else []
        for prompt in new + old:
            admission.earned.request(prompt, [False] * len(prompt))
            chosen = admission.select(prompt, 3 * 900.0, float(second))
            if second > 300 and prompt in new:
                written[len(prompt)] += len(chosen)
    assert written[2] > 0.9 * 2 * 299
    assert written[32] < 0.1 * 32 * 299


def test_blocks_that_memory_still_has_earn_nothing_below() -> None:
    found, missed = EarnedHits(1000), EarnedHits(1000)
    for prompt in prompts(100):
        for earned, above in ((found, True), (missed, False)):
            for _ in range(2):
                earned.request(prompt, [above] * 8)
    kind = kind_of(1, 8)
    assert found.worth()[kind] < 0.1 < 0.8 < missed.worth()[kind]


def test_a_hit_ahead_of_its_request_counts_once() -> None:
    """A prefetch brings blocks up before the request is told of, a load does after it."""
    ahead, after = EarnedHits(1000), EarnedHits(1000)
    for prompt in prompts(100):
        for earned in (ahead, after):
            earned.request(prompt, [True] * 8)
        ahead.loaded(prompt)
        ahead.request(prompt, [True] * 8)
        after.request(prompt, NOWHERE)
        after.loaded(prompt)
    assert ahead.worth() == pytest.approx(after.worth(), rel=0.02)


def test_how_often_a_block_was_used_is_remembered_or_told() -> None:
    earned = EarnedHits(1000)
    (prompt,) = prompts(1)
    assert earned.kind(prompt[0], 3) == kind_of(3, 0)
    for uses in range(1, 6):
        earned.request(prompt, NOWHERE)
        assert earned.kind(prompt[0]) == kind_of(uses, 8)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.booleans(), st.floats(-10, 1e4), st.floats(0, 1e4)),
        max_size=60,
    )
)
def test_the_same_calls_give_the_same_answers_and_only_what_was_offered(
    calls: list[tuple[int, bool, float, float]],
) -> None:
    every = prompts(51)
    one, other = DynamicAdmission(100), DynamicAdmission(100)
    size = len(one.earned._cells), len(one.earned._tags)
    now = 0.0
    for number, above, step, room in calls:
        now += step
        answers = []
        for admission in (one, other):
            admission.earned.request(every[number], [above] * 8)
            answers.append(admission.select(every[number], room, now))
        assert answers[0] == answers[1]
        assert set(answers[0]) <= set(every[number])
        assert set(one.admitted(every[number])) <= set(every[number])
    assert (len(one.earned._cells), len(one.earned._tags)) == size
