"""Any eviction policy, with retained blocks that go last and released ones that go first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.eviction import create_policy, policy_names
from kvtier.eviction.retention import RetainingPolicy

SLOTS = 12


def key(slot: int) -> bytes:
    return b"%08d" % slot


def filled(name: str, retained: set[int]) -> RetainingPolicy:
    policy = RetainingPolicy(create_policy(name, SLOTS), retained.__contains__, retained.__len__)
    for slot in range(SLOTS):
        policy.use([slot], [key(slot)], float(slot))
    return policy


@pytest.mark.parametrize("name", policy_names())
def test_each_is_met_once(name: str) -> None:
    retained = set(range(6))
    policy = filled(name, retained)
    policy.evict(1)
    named: list[int] = []
    victims = policy._policy.victims

    def noted(count: int, pinned: object = ()) -> list[int]:
        found = victims(count, pinned)  # type: ignore[arg-type]
        named.extend(found)
        return found

    policy._policy.victims = noted  # type: ignore[method-assign]
    policy.evict(2)
    assert len(set(named) & retained) <= len(named) - 2
    policy._policy.victims = victims  # type: ignore[method-assign]
    retained.clear()
    policy.give_back(range(6))
    assert len(policy.evict(SLOTS)) == SLOTS - 3


@pytest.mark.parametrize("name", policy_names())
def test_released_blocks_go_first_and_the_end_of_a_prefix_before_its_head(name: str) -> None:
    policy = filled(name, set())
    policy.release([8, 9, 10])
    assert policy.victims(2) == [10, 9]
    policy.use([9], [key(9)], 100.0)
    assert policy.evict(2, pinned={10})[0] == 8
    assert policy.evict(1) == [10]
    assert 9 in policy


@pytest.mark.parametrize("name", policy_names())
def test_a_retained_block_never_gives_way_to_one_that_may_be_used(name: str) -> None:
    retained = set(range(SLOTS))
    policy = filled(name, retained)
    found = policy.victims(4)
    assert set(policy.chances(found, 10.0, 20.0)) == {1.0}


steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "retain", "free", "release", "evict", "remove"]),
        st.sets(st.integers(0, SLOTS - 1), max_size=5),
        st.integers(0, 6),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", policy_names())
@settings(max_examples=60)
@given(steps=steps)
def test_what_every_policy_promises_holds_around_it(
    name: str, steps: list[tuple[str, set[int], int]]
) -> None:
    retained: set[int] = set()
    policy = RetainingPolicy(create_policy(name, SLOTS), retained.__contains__, retained.__len__)
    resident: set[int] = set()
    now = 0.0
    for what, some, count in steps:
        now += 1.0
        slots = sorted(some)
        if what == "use":
            policy.use(slots, [key(slot) for slot in slots], now)
            resident |= some
        elif what == "retain":
            retained |= some
        elif what == "free":
            retained -= some
            policy.give_back(slots)
        elif what == "release":
            retained -= some
            policy.release(slots)
        elif what == "remove":
            policy.remove(slots)
            resident -= some
        else:
            expected = policy.victims(count, some)
            found = policy.evict(count, some)
            assert found == expected
            assert len(found) == len(set(found)) == min(count, len(resident - some))
            assert set(found) <= resident - some
            spared = resident - some - set(found)
            assert not (set(found) & retained and spared - retained)
            resident -= set(found)
        assert len(policy) == len(resident)
        assert {slot for slot in range(SLOTS) if slot in policy} == resident
