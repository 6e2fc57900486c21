"""What one server may store, by its account."""

from __future__ import annotations

from kvtier.backends.object.budget import Budget

BLOCK = 10


def test_a_share_counts_from_what_the_caretaker_has_seen() -> None:
    now = [0.0]
    budget = Budget(1000, BLOCK, lambda: now[0])
    assert budget.hold(5) == (0, 0.0), "nobody has granted anything"
    budget.grant(50, seen=-1, until=60.0)
    assert budget.hold(9) == (5, 60.0)
    for _ in range(4):
        budget.reserve(BLOCK)
    assert budget.room == 10
    assert budget.mostly_unrecorded
    budget.settle(0, 30)
    budget.settle(1, 10)
    assert budget.room == 10, "recorded, and not counted yet"
    budget.grant(50, seen=0, until=60.0)
    assert budget.room == 40
    assert budget.waits_to_be_seen
    budget.grant(20, seen=1, until=60.0)
    assert budget.room == 20, "all is counted in the share itself"
    assert budget.evictable(3) == 0
    now[0] = 60.0
    assert budget.hold(1)[0] == 0, "nobody knows that we live"


def test_alone_evicting_makes_room_and_dropping_does_when_the_objects_are_deleted() -> None:
    budget = Budget(100, BLOCK, lambda: 0.0)
    budget.grant(100, seen=-1, until=60.0, alone=True)
    for _ in range(10):
        budget.reserve(BLOCK)
    assert budget.hold(1)[0] == 0
    assert budget.evictable(3) == 3
    budget.used -= BLOCK
    budget.drop(BLOCK)
    assert budget.hold(1)[0] == 0
    budget.settle(0, reserved=100, dropped=BLOCK)
    assert budget.hold(1)[0] == 0
    budget.grant(100, seen=0, until=60.0, alone=True)
    assert budget.hold(2)[0] == 1
