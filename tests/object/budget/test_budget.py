"""What one writer's account allows, beside what others claim."""

from __future__ import annotations

import msgspec
import pytest

from kvtier.backends.object.budget.budget import Budget, Grant

SHARED = Grant(
    claim=100, others=300, dead=200, writers=2, cap=1000, measured=True, lease_until=60.0
)
ALONE = Grant(alone=True, claim=500, cap=1000, measured=True, lease_until=60.0)


@pytest.fixture
def budget() -> Budget:
    """A thousand blocks of one byte, and a clock that stands."""
    return Budget(1000, 1, clock=lambda: 0.0)


def take_over(budget: Budget, standing: Grant) -> None:
    budget.apply(msgspec.structs.replace(standing, serial=budget.serial))


def granted(budget: Budget) -> int:
    blocks, _ = budget.hold(1000)
    budget.give_back()
    return blocks


def test_who_is_alone_no_more_waits_until_a_claim_is_heard(budget: Budget) -> None:
    budget.size_claim(alone=True, writers=1, cap=1000)
    take_over(budget, ALONE)
    assert granted(budget) == 500
    budget.size_claim(alone=False, writers=2, cap=1000)
    assert granted(budget) == 0
    take_over(budget, SHARED)
    assert granted(budget) == 100


@pytest.mark.parametrize("change", ["withdraw", "lower", "offer"])
def test_an_answer_to_an_older_claim_is_not_heard(budget: Budget, change: str) -> None:
    budget.used = 100
    budget.note_refused(100)
    budget.size_claim(alone=False, writers=2, cap=1000)
    take_over(budget, SHARED)
    older = msgspec.structs.replace(SHARED, claim=400, serial=budget.serial)
    if change == "withdraw":
        budget.revoke()
        assert budget.cap == 1000, "what the namespace may hold is no matter of our claim"
    elif change == "lower":
        assert budget.lower_cap(0) == 100 + 100 + 200 + 300, "as far as it is filled or claimed"
    else:
        budget.size_claim(alone=False, writers=1000, cap=1000)
    before = granted(budget)
    assert before <= 100
    budget.apply(older)
    assert granted(budget) == before


def test_others_are_left_what_is_above_the_share_and_not_filled(budget: Budget) -> None:
    take_over(budget, SHARED)
    assert budget.lower_cap(700) == 700
    assert budget.cap == 700
    assert budget.lower_cap(900) == 900, "this is no way to take more"
    assert budget.cap == 700
    budget.used, budget.deleting, budget.uncatalogued = 100, 20, 3
    assert budget.lower_cap(0) == 100 + 20 + 3 + 200 + 300 + 100, (
        "and what may be used at this moment"
    )


def test_nothing_is_dropped_for_a_bound_that_nobody_has_measured(budget: Budget) -> None:
    take_over(budget, SHARED)
    budget.used = 1300
    assert budget.surplus() == 300 + 14, "and what both keep room for"
    for unsure in ({"measured": False}, {"blocked": True}, {"lease_until": 0.0}):
        take_over(budget, msgspec.structs.replace(SHARED, **unsure))
        assert budget.surplus() == 0


def test_who_has_stored_nothing_lately_has_room_for_a_prompt(budget: Budget) -> None:
    """Each of four a sixty-fourth of the budget's fourth, and no more is kept free for it."""
    assert budget.size_claim(alone=False, writers=4, cap=1000) == 3
    standing = msgspec.structs.replace(SHARED, claim=3, others=9, dead=0, writers=4)
    take_over(budget, standing)
    assert granted(budget) == 3
    budget.used = 1000
    assert budget.surplus() == 12
    small = Budget(24, 1, clock=lambda: 0.0)
    assert small.size_claim(alone=False, writers=4, cap=24) == 1
    take_over(small, msgspec.structs.replace(standing, claim=1, others=3, cap=24))
    small.used = 24
    assert small.surplus() == 0, "where that is not a block, none is dropped for it"


def test_nothing_is_granted_without_room_for_all_that_may_be_there(budget: Budget) -> None:
    budget.size_claim(alone=True, writers=1, cap=1000)
    take_over(budget, msgspec.structs.replace(ALONE, dead=50))
    budget.used, budget.deleting, budget.uncatalogued = 600, 30, 20
    assert granted(budget) == 1000 - 600 - 30 - 20 - 50
    budget.used = 0
    budget.reserve(120)
    assert granted(budget) == 500 - 120, "of what is claimed, what is not on its way"
    budget.settle(120)
    assert granted(budget) == 500


def test_credit_is_used_once(budget: Budget) -> None:
    budget.size_claim(alone=False, writers=2, cap=1000)
    take_over(budget, SHARED)
    assert budget.hold(30)[0] == 30
    assert budget.hold(1000)[0] == 100, "what was held before is given back"
    budget.reserve(60)
    budget.give_back()
    assert granted(budget) == 40
    budget.settle(60)
    assert granted(budget) == 40, "written down or not"
    budget.unsettle(15)
    assert granted(budget) == 25, "what is no longer written down has its room from this claim"


def test_a_claim_that_is_heard_gives_no_credit_for_what_has_been_used_of_it(
    budget: Budget,
) -> None:
    budget.size_claim(alone=False, writers=2, cap=1000)
    take_over(budget, SHARED)
    budget.hold(50)
    budget.reserve(30)
    budget.reserve(20)
    budget.settle(20)
    take_over(budget, SHARED)
    assert granted(budget) == 100 - 30 - 20, "on its way, or written down since"
    take_over(budget, msgspec.structs.replace(SHARED, settled=20))
    assert granted(budget) == 100 - 30


@pytest.mark.parametrize("where", ["used", "deleting", "uncatalogued"])
def test_a_claim_gives_no_more_credit_than_there_is_room_beside_all_others(
    budget: Budget, where: str
) -> None:
    budget.size_claim(alone=False, writers=2, cap=1000)
    setattr(budget, where, 450)
    take_over(budget, SHARED)
    assert granted(budget) == 1000 - 450 - 200 - 300
    setattr(budget, where, 600)
    take_over(budget, SHARED)
    assert granted(budget) == 0
    setattr(budget, where, 0)
    take_over(budget, msgspec.structs.replace(SHARED, blocked=True))
    assert granted(budget) == 0, "somebody believes to be alone"


def test_what_is_on_its_way_is_claimed_beside_what_will_be_wanted(budget: Budget) -> None:
    ahead = budget.size_claim(alone=False, writers=2, cap=1000)
    assert ahead == 1000 // (64 * 2)
    take_over(budget, SHARED)
    budget.hold(40)
    budget.reserve(10)
    demand = 10
    assert budget.size_claim(alone=False, writers=2, cap=1000) == 10 + 30 + 4 * demand
    budget.give_back()
    budget.note_refused(500)
    assert budget.size_claim(alone=False, writers=2, cap=1000) == 10 + 1000 // 8, "and no more"
    assert granted(budget) == 90


def test_of_less_that_is_claimed_no_more_is_used(budget: Budget) -> None:
    budget.note_refused(500)
    assert budget.size_claim(alone=False, writers=2, cap=1000) == 125
    take_over(budget, SHARED)
    serial = budget.serial
    assert budget.size_claim(alone=False, writers=2, cap=400) == 50
    assert granted(budget) == 50
    assert budget.serial > serial, "and what was found to fit before is not heard any more"


def test_half_of_the_claim_unrecorded_is_worth_an_early_manifest(budget: Budget) -> None:
    budget.size_claim(alone=False, writers=2, cap=1000)
    take_over(budget, msgspec.structs.replace(SHARED, claim=7))
    budget.hold(7)
    budget.reserve(3)
    assert not budget.mostly_unrecorded
    budget.reserve(1)
    assert budget.mostly_unrecorded
    budget.settle(4)
    assert not budget.mostly_unrecorded
