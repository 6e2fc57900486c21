"""Within a budget those blocks are written that earn the most hits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.chain.admission import DynamicAdmission, EarnedHits, kind_of
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey

FAR = 1e9
NOWHERE = [False] * 8


def prompts(count: int, blocks: int = 8, start: int = 0) -> list[list[BlockKey]]:
    keys = make_keys(count * blocks, start=start)
    return [keys[at : at + blocks] for at in range(0, len(keys), blocks)]


def test_with_room_for_all_all_are_written() -> None:
    admission = DynamicAdmission(1000)
    for at, prompt in enumerate(prompts(20)):
        admission.earned.request(prompt, NOWHERE)
        assert admission.select(prompt, FAR, float(at)) == prompt


def test_with_nothing_left_nothing_is_written() -> None:
    admission = DynamicAdmission(1000)
    for at, prompt in enumerate(prompts(20)):
        admission.earned.request(prompt, NOWHERE)
        assert admission.select(prompt, 0.0, float(at)) == []


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
    size = one.earned.nbytes
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
    assert one.earned.nbytes == size
