"""Who may retain how much, for how long, and what is given back."""

from __future__ import annotations

import math

import pytest

from kvtier.eviction.retention import (
    PINNED,
    SESSIONS_MAX,
    RefusedBlocks,
    RetainedBlocks,
    is_session,
)
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey

KEYS = make_keys(64)


class Told:
    """A list, a clock that stands still, and what the tier holds."""

    def __init__(self, budget: int) -> None:
        self.now = 1000.0
        self.retained = RetainedBlocks(lambda: self.now)
        self.retained.allow(budget)
        self.here = set(KEYS)

    def retain(self, keys: list[BlockKey], session: str, seconds: float = 60.0) -> int:
        return self.retained.retain(keys, session, self.now + seconds, self.here.__contains__)

    def held(self) -> set[BlockKey]:
        return {key for key in KEYS if key in self.retained}


def test_a_prefix_is_retained_from_its_head_and_the_rest_is_refused() -> None:
    told = Told(4)
    assert told.retain(KEYS[:6], "a") == 2
    assert told.held() == set(KEYS[:4])
    assert told.retained.refused == 2
    assert told.retain(KEYS[:4], "a") == 0, "the same again takes nothing more"


def test_what_has_ended_is_given_back() -> None:
    told = Told(8)
    told.retain(KEYS[:2], "a", 10.0)
    told.retain(KEYS[1:3], "b", 30.0)
    told.now += 10.0
    told.retained.expire()
    assert told.retained.take_ended() == KEYS[:1]
    told.retain(KEYS[1:2], "b", 100.0)
    told.now += 20.0
    told.retained.expire()
    assert told.held() == {KEYS[1]}, "it was prolonged"
    told.now = math.inf
    told.retained.expire()
    assert len(told.retained) == 0
    assert told.retained._sessions == {}


def test_sessions_share_the_budget_as_equals() -> None:
    told = Told(12)
    assert told.retain(KEYS[:12], "first") == 0
    assert told.retain(KEYS[20:32], "second") == 6
    counts = [len(told.retained.blocks_of(name)) for name in ("first", "second")]
    assert counts == [6, 6]
    assert told.retained.blocks_of("first") == KEYS[:6], "its head stays"
    assert told.retained.refused == 6 + 6
    told.retain(KEYS[40:52], "third")
    counts = [len(told.retained.blocks_of(name)) for name in ("first", "second", "third")]
    assert sum(counts) == 12
    assert 3 <= min(counts) <= max(counts) <= 5
    assert told.retained.take_ended(), "what was taken from others is like other blocks"


def test_shared_blocks_count_once_and_stay_as_long_as_one_needs_them() -> None:
    told = Told(4)
    told.retain(KEYS[:3], "a")
    assert told.retain(KEYS[:3] + KEYS[10:11], "b") == 0
    assert told.retained.release("a") == []
    assert told.held() == {*KEYS[:3], KEYS[10]}
    assert told.retained.release("b") == [*KEYS[:3], KEYS[10]]
    assert told.retained.released == 4
    assert told.retained.release("b") == []


def test_what_is_pinned_keeps_its_places() -> None:
    told = Told(6)
    told.retain(KEYS[:6], "a")
    told.retained.pin(dict.fromkeys(KEYS[10:14], math.inf))
    assert set(told.retained.blocks_of(PINNED)) == set(KEYS[10:14])
    assert told.retain(KEYS[20:30], "b") == 9
    assert set(told.retained.blocks_of(PINNED)) == set(KEYS[10:14])
    told.retained.pin({KEYS[10]: math.inf})
    assert told.retained.blocks_of(PINNED) == [KEYS[10]]
    assert PINNED not in told.retained.take_all()


def test_blocks_that_are_not_there_leave_their_places() -> None:
    told = Told(4)
    told.retain(KEYS[:4], "gone")
    told.here -= set(KEYS[1:4])
    assert told.retain(KEYS[10:13], "a") == 0
    assert told.held() == {KEYS[0], *KEYS[10:13]}


def test_one_call_looks_at_few_of_the_blocks_that_may_be_absent() -> None:
    """A call is a part of an engine's step, however long the list is."""
    absent, looked = make_keys(40 * 500), 0
    retained = RetainedBlocks(lambda: 1000.0)
    retained.allow(len(absent))
    for start in range(0, len(absent), 2000):
        retained.retain(absent[start : start + 2000], f"gone {start}", math.inf, lambda _: True)

    def here(_: BlockKey) -> bool:
        nonlocal looked
        looked += 1
        return False

    fresh = make_keys(len(absent), start=len(absent))
    for start in range(0, len(fresh), 500):
        looked = 0
        assert retained.retain(fresh[start : start + 500], "new", math.inf, here) == 0
        assert looked <= 512
    assert retained.blocks_of("new") == fresh
    assert len(retained.take_ended()) == len(absent)


def test_one_call_lets_go_of_few_of_those_that_have_ended() -> None:
    many, now = make_keys(4096), 1000.0
    retained = RetainedBlocks(lambda: now)
    retained.allow(len(many))
    retained.retain(many, "a", 1060.0, lambda _: True)
    retained.retain(many[:1], "a", 2000.0, lambda _: True)
    now = 1060.0
    for calls in range(1, 9):
        retained.expire()
        assert len(retained) >= len(many) - 512 * calls
    retained.expire()
    assert retained.blocks_of("a") == many[:1], "it was prolonged"


def test_sessions_without_end_are_bounded() -> None:
    told = Told(SESSIONS_MAX * 2)
    for number in range(SESSIONS_MAX + 10):
        told.retain(KEYS[:1], f"s{number}", math.inf)
    assert len(told.retained._sessions) == SESSIONS_MAX
    assert told.retained.refused == 10
    for _ in range(9000):
        told.now += 0.001
        told.retain(KEYS[:1], "s0")
    assert len(told.retained._ends) < 5000


@pytest.mark.parametrize("seconds", [0.0, -5.0, math.nan])
def test_an_end_that_is_none_is_refused(seconds: float) -> None:
    told = Told(4)
    assert told.retain(KEYS[:2], "a", seconds) == 2
    assert len(told.retained) == 0
    assert told.retained._sessions == {}


def test_without_a_budget_nothing_is_retained() -> None:
    told = Told(0)
    assert told.retain(KEYS[:2], "a") == 2


def test_the_list_outlives_its_process() -> None:
    told = Told(8)
    told.retain(KEYS[:3], "a", 60.0)
    told.retain(KEYS[3:4], "a", 5.0)
    told.retain(KEYS[:1], "b", math.inf)
    again = Told(8)
    again.now = told.now + 10.0
    again.retained.restore(told.retained.take_all())
    assert again.held() == set(KEYS[:3])
    assert not again.retained.changed
    assert again.retained.release("a") == KEYS[1:3]


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        *((name, True) for name in ("a", "x" * 128, "Käse")),
        *((name, False) for name in ("x" * 129, "", 3, "a\nb", PINNED, None)),
    ],
)
def test_names_of_sessions(name: object, fine: bool) -> None:
    assert is_session(name) is fine


def test_what_others_were_refused_is_still_wanted_when_a_session_lets_go() -> None:
    told = Told(2)
    told.retain(KEYS[:4], "a")
    told.retain(KEYS[:3], "b", 30.0)  # shares two places, and one is refused
    assert told.retained.release("a") == [], "b retains both"
    assert told.retained.wanted(KEYS[2]), "b would retain it"
    assert not told.retained.wanted(KEYS[3])
    told.now += 30.0
    told.retained.expire()
    assert not told.retained.wanted(KEYS[2])


def test_a_place_that_is_taken_away_is_still_wanted() -> None:
    told = Told(4)
    told.retain(KEYS[:4], "first")
    told.retain(KEYS[2:3] + KEYS[10:11], "second")
    assert KEYS[3] not in told.retained, "the second one took its place"
    assert told.retained.wanted(KEYS[3])
    told.retained.release("second")
    assert told.retain(KEYS[:4], "first") == 0
    told.retained.release("first")
    assert not any(map(told.retained.wanted, KEYS))


def test_what_was_refused_is_bounded() -> None:
    refused = RefusedBlocks(4, 2, lambda: 0.0)
    refused.note("a", KEYS[:3], 1.0)
    refused.note("b", KEYS[2:6], 1.0)
    refused.note("c", KEYS[:1], 1.0)
    assert len(refused) == 4
    refused.forget("a")
    assert set(KEYS[:8]) & {key for key in KEYS if key in refused} == set(KEYS[2:4])
    refused.forget("b", KEYS[2:4])
    assert len(refused) == 0
