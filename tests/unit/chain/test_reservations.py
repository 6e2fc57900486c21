"""What is reserved, beside a plain count of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvtier.chain.lookup import Reservations
from kvtier.chain.plan import COMING, HOST, JOINING, NOWHERE
from kvtier.testing.subject import make_keys

KEYS = make_keys(14)
LOWER = (1, 2)
counts = st.integers(0, 6)
places = st.sampled_from([HOST, *LOWER, *LOWER, NOWHERE, COMING, JOINING])


def reservations(slots: int, queues: list[int], slotless: frozenset[int] = frozenset()) -> Any:
    """With what they look at: host memory's figures, and the loads that are under way."""
    host: Any = SimpleNamespace(pinned=0, in_flight=0, quarantined=0)
    host.stats = lambda: host
    ledger: Any = SimpleNamespace(promised={}, loading=[0] * len(queues))
    context: Any = SimpleNamespace(
        tiers=[host], slots=[slots], queues=queues, ledger=ledger, direct=slotless
    )
    made = Reservations(context)
    return SimpleNamespace(host=host, ledger=ledger, context=context, all=made, held=made.held)


class ReservationsMachine(RuleBasedStateMachine):
    """Requests ask and begin, loads end, slots are taken and set free, steps pass."""

    @initialize(
        slots=st.integers(1, 10), queues=st.lists(st.integers(1, 6), min_size=2, max_size=2)
    )
    def begin(self, slots: int, queues: list[int]) -> None:
        self.slots, self.queues = slots, [0, *queues]
        self.world = reservations(slots, self.queues)
        self.places = dict.fromkeys(KEYS, NOWHERE)

    def free(self) -> int:
        host = self.world.host
        return self.slots - host.pinned - host.in_flight - host.quarantined

    def queue(self, tier: int) -> int:
        """Blocks of a tier that the mover would take, beyond all that was promised."""
        promised = Counter(self.world.held.values())
        return self.queues[tier] - self.world.ledger.loading[tier] - promised[tier]

    @rule(keys=st.sets(st.sampled_from(KEYS)), place=places)
    def lies(self, keys: set[Any], place: int) -> None:
        """Blocks come and go; what was promised stays where it is, or is promised no more."""
        for key in keys - self.world.held.keys():
            self.places[key] = place

    @rule(tiers=st.sets(st.sampled_from(LOWER)))
    def reads_files(self, tiers: set[int]) -> None:
        if not self.world.held:
            self.world.context.direct = frozenset(tiers)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def asks(self, keys: list[Any]) -> None:
        before, slotless = dict(self.world.held), self.world.context.direct
        origins = [self.places[key] for key in keys]
        slots = self.free() - len(before)
        queues = {tier: self.queue(tier) for tier in LOWER}
        taken = self.world.all.reserve(keys, origins)
        new = {
            key: at
            for key, at in zip(keys, taken, strict=True)
            if at >= HOST and at not in slotless and key not in before
        }
        assert self.world.held == before | new
        for key, was, now in zip(keys, origins, taken, strict=True):
            assert now == was or (now == NOWHERE and was >= HOST and key not in before)
            assert not (was in slotless and now == NOWHERE)
        lower, resident = sum(at > HOST for at in new.values()), list(new.values()).count(HOST)
        for tier in LOWER:
            fresh = [k for k, at in zip(keys, origins, strict=True) if at == tier]
            turned = [k for k in fresh if k not in self.world.held]
            if turned and tier not in slotless:
                full = list(new.values()).count(tier) == max(queues[tier], 0)
                wanted = sum(self.wants(k, at, before) for k, at in zip(keys, origins, strict=True))
                assert full or wanted > slots, "there was room for more"
            assert list(new.values()).count(tier) <= max(queues[tier], 0)
        if lower or any(at > HOST for at in before.values()):
            assert lower + resident <= max(slots, 0)
        else:
            assert resident == sum(
                at == HOST and k not in before for k, at in zip(keys, origins, strict=True)
            ), "nobody else was promised their slots"

    def wants(self, key: Any, origin: int, before: dict[Any, int]) -> bool:
        return origin >= HOST and key not in before and origin not in self.world.context.direct

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def loads(self, keys: set[Any]) -> None:
        """As `begin_load`: what was promised is taken in."""
        for key in keys & self.world.held.keys():
            tier = self.world.held.pop(key)
            if tier == HOST:
                self.world.host.pinned += 1
            else:
                self.world.ledger.loading[tier] += 1
                self.world.host.in_flight += 1
                self.places[key] = JOINING
        self.world.all.count_again()

    @rule()
    def loads_end(self) -> None:
        self.world.host.pinned = self.world.host.in_flight = 0
        self.world.ledger.loading = [0] * len(self.queues)
        self.world.all.count_again()

    @rule(pinned=counts, in_flight=counts, quarantined=counts)
    def others_take_slots(self, pinned: int, in_flight: int, quarantined: int) -> None:
        host = self.world.host
        host.pinned, host.in_flight, host.quarantined = pinned, in_flight, quarantined
        self.world.all.count_again()

    @rule(pinned=counts)
    def a_step_ends(self, pinned: int) -> None:
        self.world.host.pinned = pinned
        self.world.all.end()
        assert not self.world.held
        left = self.world.all.left()
        for tier in LOWER:
            assert left.queues[tier] == self.queue(tier)

    @invariant()
    def what_is_left_is_true(self) -> None:
        if not hasattr(self, "world"):
            return
        left = self.world.all.left()
        assert left.slots == self.free() - len(self.world.held) == self.world.all.room()
        assert left.promised is self.world.held
        assert left.slotless == self.world.context.direct
        assert left.queues.keys() == set(LOWER)
        for tier in LOWER:
            # What was promised and is under way by now may count twice, as long as much is left.
            assert left.queues[tier] <= self.queue(tier)
            assert left.queues[tier] >= min(self.queue(tier), self.queues[tier] // 2)


@pytest.mark.slow
def test_beside_a_plain_count() -> None:
    run_state_machine_as_test(
        ReservationsMachine, settings=settings(max_examples=150, stateful_step_count=25)
    )


def test_what_is_withheld_is_promised_to_nobody_in_this_step() -> None:
    world = reservations(6, [0, 4])
    assert world.all.spare() == [6, 4]
    world.all.withhold([1, 2])
    world.all.withhold([1, 0])
    assert world.all.spare() == [4, 2]
    assert world.all.left().slots == 4
    assert world.all.reserve(KEYS[:5], [1] * 3 + [HOST] * 2) == [1, 1, NOWHERE, HOST, HOST]
    assert world.all.spare() == [0, 0]
    world.all.end()
    assert world.all.spare() == [6, 4]
