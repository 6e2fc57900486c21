"""Claims: no order of events lets writers take the same room twice; the dead and the late."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from object_subjects import FOLDER

from kvtier.backends.object import budget as budget_module
from kvtier.backends.object import writers
from kvtier.backends.object.budget import Budget, Standing
from kvtier.backends.object.claim import Claim, ended, parse_claim
from kvtier.backends.object.claims import Claims
from kvtier.backends.object.errors import StoreError, TimedOut, Unavailable
from kvtier.backends.object.files import FileStore
from kvtier.backends.object.names import parse_block
from kvtier.backends.object.store import Buffer, ObjectInfo, PutOutcome
from kvtier.testing.records import NAMESPACE, make_keys
from kvtier.testing.subject import Rig
from kvtier.types import Namespace

CAPACITY = 24
"""In bytes: a block has one."""
LEASE_S = 60.0


class NameStore(FileStore):
    """Claims in memory, by a clock of its own; before each call others may act."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.names: dict[str, float] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        *,
        if_absent: bool = False,
        deadline: float | None = None,
    ) -> PutOutcome:
        self.meanwhile()
        self.names[name] = self.clock() + 1e6  # no two clocks agree
        return PutOutcome.STORED

    def list(
        self, prefix: str = "", *, after: str = "", deadline: float | None = None
    ) -> Iterator[ObjectInfo]:
        self.meanwhile()
        return iter([ObjectInfo(name, 0, at) for name, at in sorted(self.names.items())])

    def delete(
        self, names: Sequence[str], *, deadline: float | None = None
    ) -> Mapping[str, StoreError]:
        for name in names:
            self.names.pop(name, None)
        return {}


class FlakyStore(NameStore):
    """Some calls fail: and then the claim has come all the same, comes later, or never does."""

    def __init__(self, clock: Callable[[], float], dice: random.Random) -> None:
        super().__init__(clock)
        self.dice = dice
        self.late: list[str] = []

    def put(self, name: str, *arguments: Any, **more: Any) -> PutOutcome:
        fate = self.dice.random()
        if fate < 0.1:
            self.meanwhile()
            self.late.append(name)
            raise TimedOut("not now")
        super().put(name, *arguments, **more)
        if fate < 0.2:
            raise TimedOut("not now")
        return PutOutcome.STORED

    def list(self, *arguments: Any, **more: Any) -> Iterator[ObjectInfo]:
        if self.late and self.dice.random() < 0.2:
            name = self.late.pop()
            if self.dice.random() < 0.5:
                self.names[name] = self.clock() + 1e6
        if self.dice.random() < 0.1:
            raise Unavailable("not now")
        return super().list(*arguments, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        if self.dice.random() < 0.1:
            raise Unavailable("not now")
        return super().delete(names, **more)


class LateStore(NameStore):
    """What is put and deleted shows some seconds later, in the order in which it came."""

    def __init__(self, clock: Callable[[], float], late_s: float) -> None:
        super().__init__(clock)
        self.late_s = late_s
        self.past: deque[tuple[float, dict[str, float], frozenset[int]]] = deque()

    def remember(self, stated: set[int]) -> None:
        self.past.append((self.clock(), dict(self.names), frozenset(stated)))

    def shown(self) -> tuple[dict[str, float], frozenset[int]]:
        while len(self.past) > 1 and self.past[1][0] <= self.clock() - self.late_s:
            self.past.popleft()
        return self.past[0][1:] if self.past else ({}, frozenset())

    def list(self, *arguments: Any, **more: Any) -> Iterator[ObjectInfo]:
        self.meanwhile()
        return iter([ObjectInfo(name, 0, at) for name, at in sorted(self.shown()[0].items())])


class World:
    """What is there, what is written down, and who writes."""

    def __init__(self, seed: int, count: int, how: str = "good") -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self.store = NameStore(lambda: self.now)
        if how == "flaky":
            self.store = FlakyStore(lambda: self.now, self.dice)
        elif how == "late":
            self.store = LateStore(lambda: self.now, late_s=1.0 + seed % 12)
        self.there: set[int] = set()
        self.stated: set[int] = set()
        self.blocks = 0
        self.writers = [Model(self) for _ in range(count)]
        self.most = self.stored = 0

    def written_down(self) -> tuple[set[int], float]:
        """As the store shows it, and as it was when."""
        if isinstance(self.store, LateStore):
            return set(self.store.shown()[1]), self.now - self.store.late_s
        return set(self.stated), self.now


class Model:
    """A writer whose every step is taken apart."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.budget = Budget(CAPACITY, 1, lambda: world.now)
        self.claims = Claims(
            world.store, "ab" * 16, self.budget, lease_s=LEASE_S, clock=lambda: world.now
        )
        self.claims.take_measure({})
        self.unwritten: list[int] = []
        self.known: set[int] = set()
        self.written: dict[int, float] = {}
        self.heard: list[tuple[Standing, set[int], float]] = []
        self.busy = False

    def look(self) -> None:
        """The keeper: claim, then read what is written down; the tier hears of it later."""
        if self.busy:
            return
        self.busy = True
        with contextlib.suppress(StoreError):
            standing, _ = self.claims.renew()
            if standing is not None:
                self.heard.append((standing, *self.world.written_down()))
        self.busy = False

    def hear(self) -> None:
        if self.heard:
            standing, self.known, when = self.heard.pop(0)
            self.known |= {*self.unwritten, *(b for b, at in self.written.items() if at >= when)}
            self.budget.used = len(self.known)
            self.budget.hear(standing)

    def store(self) -> None:
        wanted = self.world.dice.randint(1, 4)
        count, _ = self.budget.hold(wanted)
        if count < wanted and not self.budget.alone:
            self.budget.refused(wanted - count)
        for _ in range(count):
            self.world.blocks += 1
            self.budget.reserve(1)
            self.unwritten.append(self.world.blocks)
            self.known.add(self.world.blocks)
            self.world.there.add(self.world.blocks)
            self.world.stored += 1
        self.budget.give_back()
        self.world.most = max(self.world.most, len(self.world.there))

    def write_down(self) -> None:
        if not self.busy:  # the same thread looks
            self.world.stated.update(self.unwritten)
            self.written |= dict.fromkeys(self.unwritten, self.world.now)
            self.budget.settle(len(self.unwritten))
            self.unwritten.clear()

    def evict(self) -> None:
        """Delete what is too much, then say so."""
        if self.busy:
            return
        for block in sorted(self.known & self.world.stated)[: max(0, self.budget.surplus())]:
            self.world.there.discard(block)
            self.world.stated.discard(block)
            self.known.discard(block)
            self.budget.used -= 1

    def step(self) -> None:
        step = self.world.dice.choice(
            [self.look, self.hear, self.store, self.store, self.write_down, self.evict]
        )
        step()


@pytest.mark.parametrize("how", ["good", "flaky", "late"])
@pytest.mark.parametrize("seed", range(100))
def test_no_order_of_events_takes_room_twice(seed: int, how: str) -> None:
    world = World(seed, 2 + seed % 3, how)

    def others_act() -> None:
        world.store.meanwhile = lambda: None
        for _ in range(world.dice.randint(0, 6)):
            act()
        world.store.meanwhile = others_act

    def act() -> None:
        world.dice.choice(world.writers).step()
        if isinstance(world.store, LateStore):
            world.store.remember(world.stated)

    world.store.meanwhile = others_act
    for _ in range(600):
        world.now += world.dice.random()
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
    sleeper.hear()
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
    other.claims.bury(dead)
    sleeper.look()
    sleeper.hear()
    assert sleeper.budget.hold(3)[0] == 0, "the other one is alone, as far as it knows"
    other.look()
    other.hear()
    sleeper.look()
    sleeper.hear()
    assert sleeper.budget.hold(3)[0] > 0


def test_names_are_read_as_they_are_written() -> None:
    claim = Claim("ab" * 16, writers.new(), 7, 1 << 40, 1 << 50, 60_000, "s", True, 5.0, 1 << 60)
    writers.ended(claim.writer)
    assert parse_claim(claim.name, 5.0) == claim
    for wrong in ("", claim.name[1:], claim.name + "x", claim.name.replace("claims", "claim")):
        assert parse_claim(wrong, 5.0) is None


def test_a_process_that_ended_is_known_to_be_dead() -> None:
    own = writers.new()
    assert writers.may_live(own)
    writers.ended(own)
    assert not writers.may_live(own)
    init = f"{own[:8]}{1:08x}{0:08x}{own[24:]}"
    assert not writers.may_live(init), "a process number is used again"
    elsewhere = f"{int(own[:8], 16) ^ 1:08x}{own[8:]}"
    assert writers.may_live(elsewhere), "of another machine nobody knows"


def test_a_process_may_have_any_name() -> None:
    """The system cuts names after 15 bytes, in the midst of a character, too."""
    script = "open('/proc/self/comm', 'wb').write(b') \\xff'); print(flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        own = writers.new()
        assert not writers.may_live(f"{own[:8]}{child.pid:08x}{0:08x}{own[24:]}")
        child.communicate(b"\n")


def test_who_has_ended_is_plain_to_see_or_not_said() -> None:
    store = NameStore(lambda: 0.0)
    namespace, other = "ab" * 16, "cd" * 16
    own = writers.new()
    dead, of_another = (f"{own[:8]}{1:08x}{0:08x}{dice:08x}" for dice in (1, 2))
    elsewhere, closed = (f"{int(own[:8], 16) ^ 1:08x}{own[8:24]}{dice:08x}" for dice in (1, 2))

    def claim(writer: str, number: int, kind: str, space: str = namespace) -> str:
        name = Claim(space, writer, number, 5, 9, 60_000, kind, False).name
        store.put(name, [])
        return name

    claim(own, 1, "a")
    claim(elsewhere, 1, "s")
    claim(of_another, 1, "a", other)
    gone = {claim(closed, 1, "a"), claim(closed, 2, "c"), claim(dead, 1, "s")}
    store.put("claims/nothing-like-a-claim", [])
    assert set(ended(store, namespace)) == gone
    writers.ended(own)


def weight(folder: Path) -> int:
    return sum(i.size for i in FileStore(folder / "store").list() if parse_block(i.name))


def test_two_living_namespaces_share_one_budget(tmp_path: Path) -> None:
    newer = Namespace(facts={"model": "newer"}, group_bytes=NAMESPACE.group_bytes)
    old = Rig(FOLDER, tmp_path, blocks=8)
    assert old.put(make_keys(3))
    new = Rig(FOLDER, tmp_path, blocks=8, namespace=newer)
    assert new.put(make_keys(2)) == [], "the old one may use everything"
    end = time.monotonic() + 60
    number = 0
    while len(new.resident(make_keys(1000))) < 3:
        assert time.monotonic() < end, "no room is ever given"
        for rig in (old, new):
            rig.put(make_keys(2, start=number))
            assert weight(tmp_path) <= 8 * 12288
            rig.settle()
        number += 2
    new.close()
    old.close()


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
        claims.take_measure({f"{int(space[1:]):032x}": size for space, size in found.items()})
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
    smaller.hungry = True
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
    model.hear()
    before = set(world.store.names)
    put = world.store.put

    def fail(name: str, buffers: Sequence[Buffer], **more: object) -> PutOutcome:
        if landed:
            put(name, buffers)
        raise Unavailable("not now")

    world.now += LEASE_S / 2
    world.store.put = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(Unavailable):
        model.claims.renew()
    world.store.put = put  # type: ignore[method-assign]
    assert before <= set(world.store.names)
    world.now += 1.0
    standing, _ = model.claims.renew()
    assert standing is not None
    assert model.claims.measured, "nothing need be listed again"
    assert standing.cap == CAPACITY
    assert standing.lease_until == world.now + LEASE_S
    assert len(world.store.names) == 1


@pytest.mark.parametrize("late_s", [1.0, 7.0, 14.0])
def test_a_listing_that_comes_late_takes_nobody_for_dead(late_s: float) -> None:
    world = World(0, 2)
    store = world.store = LateStore(lambda: world.now, late_s)
    told = 0
    for model in world.writers:
        model.claims._store = store
    for _ in range(60):
        for model in world.writers:
            model.look()
            store.remember(world.stated)
            told += len(model.heard)
            model.hear()
        world.now += 5.0
    assert all(model.claims.measured for model in world.writers), "nothing need be listed again"
    assert all(model.budget.hold(1)[0] == 1 for model in world.writers)
    assert told > 30
    assert len(store.names) <= 4, "old claims go when the new ones are shown"
