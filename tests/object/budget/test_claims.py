"""Claims: no order of events lets writers take the same room twice; the dead and the late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from support.object.claim_simulation import CAPACITY, LEASE_S, LateStore, NameStore, World

from kvtier.backends.object import writer_ids
from kvtier.backends.object.budget import budget as budget_module
from kvtier.backends.object.budget.budget import Budget
from kvtier.backends.object.budget.claim import Claim, claims_of_ended_writers, parse_claim
from kvtier.backends.object.budget.claims import Claims
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.backends.object.stores.store import Buffer, PutOutcome


@pytest.mark.parametrize("how", ["good", "flaky", "late"])
@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(each, marks=pytest.mark.slow) for each in range(20, 100))]
)
def test_no_order_of_events_takes_room_twice(seed: int, how: str) -> None:
    world = World(seed, 2 + seed % 3, how)

    def others_act() -> None:
        world.store.meanwhile = lambda: None
        for _ in range(world.rng.randint(0, 6)):
            act()
        world.store.meanwhile = others_act

    def act() -> None:
        world.rng.choice(world.writers).step()
        if isinstance(world.store, LateStore):
            world.store.remember(world.stated)

    world.store.meanwhile = others_act
    for _ in range(600):
        world.now += world.rng.random()
        act()
    assert world.most <= CAPACITY
    if how == "good":
        assert world.most > CAPACITY // 2
        assert world.stored > CAPACITY, "they do store"
    elif how == "late":
        assert world.stored > CAPACITY // 8, "they do store"


def test_a_writer_that_slept_stores_nothing_until_it_has_looked() -> None:
    world = World(1, 2)
    sleeper, other = world.writers
    sleeper.look()
    sleeper.apply()
    assert sleeper.budget.hold(3)[0] == 3
    sleeper.budget.give_back()
    world.now += 2 * LEASE_S
    assert sleeper.budget.hold(3) == (0, 0.0)
    other.look()
    other.look()
    standing, dead = other.claims.renew()
    assert standing is not None
    assert standing.alone
    assert standing.dead > CAPACITY, "what the sleeper may have left is counted"
    assert len(dead) == 1
    other.claims.drop_dead(dead)
    sleeper.look()
    sleeper.apply()
    assert sleeper.budget.hold(3)[0] == 0, "the other one is alone, as far as it knows"
    other.look()
    other.apply()
    sleeper.look()
    sleeper.apply()
    assert sleeper.budget.hold(3)[0] > 0


def test_names_are_read_as_they_are_written() -> None:
    claim = Claim(
        "ab" * 16, writer_ids.new_writer_id(), 7, 1 << 40, 1 << 50, 60_000, "s", True, 5.0, 1 << 60
    )
    writer_ids.mark_ended(claim.writer)
    assert parse_claim(claim.name, 5.0) == claim
    for wrong in ("", claim.name[1:], claim.name + "x", claim.name.replace("claims", "claim")):
        assert parse_claim(wrong, 5.0) is None


def test_a_process_that_ended_is_known_to_be_dead() -> None:
    own = writer_ids.new_writer_id()
    assert writer_ids.may_live(own)
    writer_ids.mark_ended(own)
    assert not writer_ids.may_live(own)
    init = f"{own[:8]}{1:08x}{0:08x}{own[24:]}"
    assert not writer_ids.may_live(init), "a process number is used again"
    elsewhere = f"{int(own[:8], 16) ^ 1:08x}{own[8:]}"
    assert writer_ids.may_live(elsewhere), "of another machine nobody knows"


def test_a_process_may_have_any_name() -> None:
    """The system cuts names after 15 bytes, in the midst of a character, too."""
    script = "open('/proc/self/comm', 'wb').write(b') \\xff'); print(flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        own = writer_ids.new_writer_id()
        assert not writer_ids.may_live(f"{own[:8]}{child.pid:08x}{0:08x}{own[24:]}")
        child.communicate(b"\n")


def test_who_has_ended_is_plain_to_see_or_not_said() -> None:
    store = NameStore(lambda: 0.0)
    namespace, other = "ab" * 16, "cd" * 16
    own = writer_ids.new_writer_id()
    dead, of_another = (f"{own[:8]}{1:08x}{0:08x}{rng:08x}" for rng in (1, 2))
    elsewhere, closed = (f"{int(own[:8], 16) ^ 1:08x}{own[8:24]}{rng:08x}" for rng in (1, 2))

    def claim(writer: str, number: int, kind: str, space: str = namespace) -> str:
        name = Claim(space, writer, number, 5, 9, 60_000, kind, False).name
        store.put(name, [])
        return name

    claim(own, 1, "a")
    claim(elsewhere, 1, "s")
    claim(of_another, 1, "a", other)
    gone = {claim(closed, 1, "a"), claim(closed, 2, "c"), claim(dead, 1, "s")}
    store.put("claims/nothing-like-a-claim", [])
    assert set(claims_of_ended_writers(store, namespace)) == gone
    writer_ids.mark_ended(own)


class Spaces:
    """Namespaces that share a store, each with one writer and a capacity of its own."""

    def __init__(self, *capacities: int) -> None:
        self.now = 0.0
        self.store = NameStore(lambda: self.now)
        self.claims = [
            Claims(
                self.store,
                f"{number:032x}",
                Budget(capacity, 1, self.clock),
                lease_s=LEASE_S,
                clock=self.clock,
            )
            for number, capacity in enumerate(capacities)
        ]

    def clock(self) -> float:
        return self.now

    def audit(self, number: int, **found: int) -> int:
        """What a namespace may hold after it has found so much of others."""
        claims = self.claims[number]
        claims.cap.note_foreign({f"{int(space[1:]):032x}": size for space, size in found.items()})
        standing, _ = claims.renew()
        assert standing is not None
        return standing.cap


def test_a_larger_capacity_takes_nothing_from_who_is_there() -> None:
    """As while servers are started again with another one."""
    spaces = Spaces(24, 48)
    assert spaces.audit(0) == 24
    assert spaces.audit(1, n0=20) == 24
    assert spaces.audit(0, n1=0) == 24, "what another may hold does not lie there"
    assert spaces.audit(0, n1=24) == 24, "nor has he taken it from us"
    assert spaces.audit(0, n1=24, n7=30) == 18, "of this one nobody knows"


def test_the_largest_capacity_of_the_living_counts(caplog: pytest.LogCaptureFixture) -> None:
    spaces = Spaces(48, 24, budget_module.UNLIMITED)
    larger, smaller, _ = spaces.claims
    assert spaces.audit(0) == 48
    assert spaces.audit(1, n0=48) == 0, "all is claimed"
    smaller.cap.needs_room = True
    assert spaces.audit(1, n0=48) == 0
    assert spaces.audit(0, n1=0) == 24, "his fair share is left to him"
    assert spaces.audit(1, n0=24) == 24
    spaces.audit(2)
    assert spaces.audit(1, n0=24) == 24, "who has none has none to agree on"
    assert (larger._budget.capacity, smaller._budget.capacity) == (48, 48)
    [said] = [record.getMessage() for record in caplog.records]
    assert "while one runs with 48B, the 24B of this one do not count" in said
    larger.close(clean=True)
    spaces.audit(1, n0=24)
    assert smaller._budget.capacity == 24


def test_who_has_no_capacity_claims_what_he_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "_AHEAD_OF_UNLIMITED", 3)
    spaces = Spaces(24, budget_module.UNLIMITED)
    spaces.claims[1]._budget.used = 5
    assert spaces.audit(1) == budget_module.UNLIMITED
    assert spaces.audit(0) == 24 - 8
    spaces.claims[1]._budget.used = 9
    spaces.now += LEASE_S / 2
    assert spaces.audit(1, n0=0) >= budget_module.UNLIMITED - 24
    assert spaces.audit(0, n1=9) == 24 - 8, "he takes his room elsewhere"
    spaces.claims[1].close(clean=True)
    [left] = [claim for name in spaces.store.names if (claim := parse_claim(name, 0.0)).kind == "c"]
    assert left.cap == 12


@pytest.mark.parametrize("landed", [False, True])
def test_a_claim_that_could_not_be_renewed_stands_as_long_as_its_lease(landed: bool) -> None:
    world = World(0, 1)
    [model] = world.writers
    model.look()
    model.apply()
    before = set(world.store.names)
    put = world.store.put

    def fail(name: str, buffers: Sequence[Buffer], **more: object) -> PutOutcome:
        if landed:
            put(name, buffers)
        raise Unavailable("not now")

    world.now += LEASE_S / 2
    world.store.put = fail  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        model.claims.renew()
    world.store.put = put  # type: ignore[method-assign]
    assert before <= set(world.store.names)
    world.now += 1.0
    standing, _ = model.claims.renew()
    assert standing is not None
    assert model.claims.cap.measured, "nothing need be listed again"
    assert standing.cap == CAPACITY
    assert standing.lease_until == world.now + LEASE_S
    assert len(world.store.names) == 1


@pytest.mark.parametrize("late_s", [1.0, 7.0, 14.0])
def test_a_listing_that_comes_late_takes_nobody_for_dead(late_s: float) -> None:
    world = World(0, 2)
    store = world.store = LateStore(lambda: world.now, late_s)
    heard = 0
    for model in world.writers:
        model.claims._store = store
    for _ in range(60):
        for model in world.writers:
            model.look()
            store.remember(world.stated)
            heard += len(model.heard)
            model.apply()
        world.now += 5.0
    assert all(model.claims.cap.measured for model in world.writers), "nothing need be listed again"
    assert all(model.budget.hold(1)[0] == 1 for model in world.writers)
    assert heard > 30
    assert len(store.names) <= 4, "old claims go when the new ones are shown"


def test_who_was_taken_for_dead_uses_nothing_until_all_is_known_anew() -> None:
    world = World(0, 1)
    [model] = world.writers
    model.look()
    model.apply()
    assert model.budget.hold(1)[0] == 1
    model.budget.give_back()
    world.store.names.clear()
    standing, _ = model.claims.renew()
    assert standing is not None
    assert model.budget.hold(1)[0] == 0
    assert not model.claims.cap.measured
    assert standing.cap == 0, "others may have taken it"
    [claim] = [parse_claim(name, 0.0) for name in world.store.names]
    assert claim is not None
    assert claim.cap == 0, "nor is anything taken from them"
    assert not standing.measured
    model.claims.cap.note_foreign({})
    model.look()
    model.apply()
    assert model.budget.hold(1)[0] == 1


def test_who_was_late_to_renew_finds_out_what_others_have_done() -> None:
    """His claim is there still, but who came and went in the meantime nobody tells."""
    world = World(0, 1)
    [model] = world.writers
    model.look()
    world.now += LEASE_S - 1.0
    model.look()
    assert model.claims.cap.measured
    world.now += LEASE_S
    model.look()
    assert not model.claims.cap.measured


def test_who_comes_at_the_same_moment_makes_nobody_wait_for_another_look() -> None:
    world = World(0, 2)
    one, other = world.writers

    def come() -> None:
        if any(one.claims.writer in name for name in world.store.names):
            world.store.meanwhile = lambda: None
            other.look()

    world.store.meanwhile = come
    one.look()
    kinds = {claim.kind for name in world.store.names if (claim := parse_claim(name, 0.0))}
    assert kinds == {"s"}
    one.apply()
    other.apply()
    assert not one.budget.alone
    assert not other.budget.alone


def test_who_comes_to_others_of_his_model_believes_what_they_have_found_to_fit() -> None:
    world = World(0, 2)
    one, newcomer = world.writers
    one.claims.cap.note_foreign({"cd" * 16: 10})
    one.look()
    newcomer.claims.cap.measured = False
    standing, _ = newcomer.claims.renew()
    assert standing is not None
    assert (standing.cap, standing.measured) == (CAPACITY - 10, True)
    one.claims.close(clean=True)
    world.store.names = {name: at for name, at in world.store.names.items() if "-c" not in name}
    newcomer.claims.cap.note_foreign({})
    standing, _ = newcomer.claims.renew()
    assert standing is not None
    assert standing.cap == CAPACITY, "by now he knows himself"


def test_no_room_is_left_to_a_dead_writer_that_needed_it() -> None:
    spaces = Spaces(24, 24, 24)
    assert spaces.audit(0) == 24
    spaces.claims[1].cap.needs_room = True
    assert spaces.audit(1, n0=24) == 0
    for _ in range(4):  # he does not renew
        spaces.now += LEASE_S / 2
        spaces.claims[0].renew()
    assert spaces.audit(2, n0=24) == 0
    assert spaces.audit(0) == 24
    spaces.claims[2].cap.needs_room = True
    assert spaces.audit(2, n0=24) == 0
    assert spaces.audit(0) == 12, "but to those who live"


def test_when_the_larger_capacity_has_gone_nobody_keeps_what_it_allowed() -> None:
    spaces = Spaces(48, 24)
    larger, smaller = spaces.claims
    assert spaces.audit(0, n7=40) == 8
    assert spaces.audit(1) == 40
    larger.close(clean=True)
    standing, _ = smaller.renew()
    assert standing is not None
    assert standing.cap == 24, "and no listing need tell of it"
