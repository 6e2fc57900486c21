"""What one writer's account allows, beside what others claim."""

from __future__ import annotations

import msgspec
import pytest

from kvtier.backends.object.budget import Budget, Standing

SHARED = Standing(
    claim=100, others=300, dead=200, writers=2, cap=1000, measured=True, lease_until=60.0
)
ALONE = Standing(alone=True, claim=500, cap=1000, measured=True, lease_until=60.0)


@pytest.fixture
def budget() -> Budget:
    """A thousand blocks of one byte, and a clock that stands."""
    return Budget(1000, 1, clock=lambda: 0.0)


def hear(budget: Budget, standing: Standing) -> None:
    budget.hear(msgspec.structs.replace(standing, serial=budget.serial))


def granted(budget: Budget) -> int:
    blocks, _ = budget.hold(1000)
    budget.give_back()
    return blocks


def test_who_is_alone_no_more_waits_until_a_claim_is_heard(budget: Budget) -> None:
    budget.offer(alone=True, writers=1, cap=1000)
    hear(budget, ALONE)
    assert granted(budget) == 500
    budget.offer(alone=False, writers=2, cap=1000)
    assert granted(budget) == 0
    hear(budget, SHARED)
    assert granted(budget) == 100


@pytest.mark.parametrize("change", ["withdraw", "lower", "offer"])
def test_an_answer_to_an_older_claim_is_not_heard(budget: Budget, change: str) -> None:
    budget.used = 100
    budget.refused(100)
    budget.offer(alone=False, writers=2, cap=1000)
    hear(budget, SHARED)
    older = msgspec.structs.replace(SHARED, claim=400, serial=budget.serial)
    if change == "withdraw":
        budget.withdraw()
    elif change == "lower":
        assert budget.lower(0) == 100 + 100 + 200 + 300, "as far as it is filled or claimed"
    else:
        budget.offer(alone=False, writers=1000, cap=1000)
    before = granted(budget)
    assert before <= 100
    budget.hear(older)
    assert granted(budget) == before


def test_others_are_left_what_is_above_the_share_and_not_filled(budget: Budget) -> None:
    hear(budget, SHARED)
    assert budget.lower(700) == 700
    assert budget.cap == 700
    assert budget.lower(900) == 900, "this is no way to take more"
    assert budget.cap == 700
    budget.used, budget.dying, budget.hidden = 100, 20, 3
    assert budget.lower(0) == 100 + 20 + 3 + 200 + 300 + 100, "and what may be used at this moment"


def test_nothing_is_dropped_for_a_bound_that_nobody_has_measured(budget: Budget) -> None:
    hear(budget, SHARED)
    budget.used = 1300
    assert budget.surplus() == 300 + 14, "and what both keep room for"
    for unsure in ({"measured": False}, {"blocked": True}, {"lease_until": 0.0}):
        hear(budget, msgspec.structs.replace(SHARED, **unsure))
        assert budget.surplus() == 0


def test_who_has_stored_nothing_lately_has_room_for_a_prompt(budget: Budget) -> None:
    """Each of four a sixty-fourth of the budget's fourth, and no more is kept free for it."""
    assert budget.offer(alone=False, writers=4, cap=1000) == 3
    standing = msgspec.structs.replace(SHARED, claim=3, others=9, dead=0, writers=4)
    hear(budget, standing)
    assert granted(budget) == 3
    budget.used = 1000
    assert budget.surplus() == 12
    small = Budget(24, 1, clock=lambda: 0.0)
    assert small.offer(alone=False, writers=4, cap=24) == 1
    hear(small, msgspec.structs.replace(standing, claim=1, others=3, cap=24))
    small.used = 24
    assert small.surplus() == 0, "where that is not a block, none is dropped for it"
