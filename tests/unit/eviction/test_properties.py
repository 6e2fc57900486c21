"""What every eviction policy promises, held against a plain set of resident slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvtier.eviction import UNKNOWN, create_policy, policy_names

SLOTS_MAX = 40
FIXED_BYTES = 400_000
BYTES_A_SLOT = 60


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


class PolicyMachine(RuleBasedStateMachine):
    """Any calls in any order; the model is the set of slots that should be resident."""

    name: str

    @initialize(slots=st.integers(0, 8))
    def open(self, slots: int) -> None:
        self.policy = create_policy(self.name, slots)
        self.slots = slots
        self.resident: set[int] = set()
        self.now = 0.0

    def subset(self, data: st.DataObject, label: str) -> list[int]:
        if not self.slots:
            return []
        return data.draw(
            st.lists(st.integers(0, self.slots - 1), unique=True, max_size=12), label=label
        )

    @rule(
        data=st.data(),
        first_key=st.integers(0, 60),
        step=st.sampled_from([0.0, 0.01, 1.0, 500.0, -3.0]),
        ahead=st.sampled_from([0, 0, 1, 7]),
    )
    def use(self, data: st.DataObject, first_key: int, step: float, ahead: int) -> None:
        slots = self.subset(data, "slots")
        others = [UNKNOWN, *(slot for slot in range(self.slots) if slot not in slots)]
        after = data.draw(st.sampled_from(others), label="after")
        self.now += step
        keys = [key(first_key + index) for index in range(len(slots))]
        self.policy.use(slots, keys, self.now, after, ahead)
        self.resident.update(slots)

    @rule(data=st.data(), count=st.integers(0, SLOTS_MAX))
    def evict(self, data: st.DataObject, count: int) -> None:
        pinned = set(self.subset(data, "pinned"))
        foretold = self.policy.victims(count, pinned)
        assert len(self.policy) == len(self.resident)
        evicted = self.policy.evict(count, pinned)
        assert evicted == foretold
        assert len(set(evicted)) == len(evicted) == min(count, len(self.resident - pinned))
        assert set(evicted) <= self.resident - pinned
        self.resident.difference_update(evicted)

    @rule(data=st.data(), count=st.integers(0, SLOTS_MAX))
    def look_ahead(self, data: st.DataObject, count: int) -> None:
        found = self.policy.victims(count, set(self.subset(data, "pinned")))
        assert set(found) <= self.resident
        assert len(set(found)) == len(found) <= count

    @rule()
    def all_pinned(self) -> None:
        assert self.policy.evict(SLOTS_MAX, range(SLOTS_MAX)) == []

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slots = self.subset(data, "slots")
        self.policy.remove(slots)
        self.resident.difference_update(slots)

    @rule(more=st.integers(1, 8))
    def grow(self, more: int) -> None:
        self.slots = min(self.slots + more, SLOTS_MAX)
        self.policy.resize(self.slots)
        self.policy.resize(self.slots // 2)

    @rule(data=st.data(), timed=st.booleans())
    def load(self, data: st.DataObject, timed: bool) -> None:
        slots = [slot for slot in self.subset(data, "slots") if slot not in self.resident]
        times = [self.now - (len(slots) - index) // 2 for index in range(len(slots))]
        self.policy.load(slots, times if timed else None)
        self.resident.update(slots)

    @invariant()
    def knows_what_is_resident(self) -> None:
        assert len(self.policy) == len(self.resident)
        assert [slot in self.policy for slot in range(self.slots)] == [
            slot in self.resident for slot in range(self.slots)
        ]
        assert self.slots not in self.policy
        assert UNKNOWN not in self.policy

    @invariant()
    def stays_small(self) -> None:
        assert self.policy.nbytes <= FIXED_BYTES + BYTES_A_SLOT * self.slots

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            left = self.policy.evict(SLOTS_MAX + 1)
            assert sorted(left) == sorted(self.resident)
            assert len(self.policy) == 0


def machine(name: str) -> Callable[[], PolicyMachine]:
    return type(f"{name}Machine", (PolicyMachine,), {"name": name})


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_keeps_its_promises(name: str) -> None:
    run_state_machine_as_test(
        machine(name),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
