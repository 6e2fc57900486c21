"""Writers who share a store of claims, good or bad as a test wants it, in any order of events."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtier.backends.object.budget.budget import Budget, Grant
from kvtier.backends.object.budget.claims import Claims
from kvtier.backends.object.stores.errors import StoreError, TimedOut, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo, PutOutcome

CAPACITY = 24
"""In bytes: a block has one."""
LEASE_S = 60.0


class NameStore(FileStore):
    """Claims in memory, by a clock of its own; before each call others may act."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.names: dict[str, float] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def put(self, name: str, *_: Any, **more: Any) -> PutOutcome:
        self.meanwhile()
        self.names[name] = self.clock() + 1e6  # no two clocks agree
        return PutOutcome.STORED

    def list(self, *_: Any, **more: Any) -> Iterator[ObjectInfo]:
        self.meanwhile()
        return iter([ObjectInfo(name, 0, at) for name, at in sorted(self.names.items())])

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        for name in names:
            self.names.pop(name, None)
        return {}


class FlakyStore(NameStore):
    """Some calls fail: and then the claim has come all the same, comes later, or never does."""

    def __init__(self, clock: Callable[[], float], rng: random.Random) -> None:
        super().__init__(clock)
        self.rng = rng
        self.late: list[str] = []

    def put(self, name: str, *arguments: Any, **more: Any) -> PutOutcome:
        fate = self.rng.random()
        if fate < 0.1:
            self.meanwhile()
            self.late.append(name)
            raise TimedOut("not now")
        super().put(name, *arguments, **more)
        if fate < 0.2:
            raise TimedOut("not now")
        return PutOutcome.STORED

    def list(self, *arguments: Any, **more: Any) -> Iterator[ObjectInfo]:
        if self.late and self.rng.random() < 0.2:
            name = self.late.pop()
            if self.rng.random() < 0.5:
                self.names[name] = self.clock() + 1e6
        if self.rng.random() < 0.1:
            raise Unavailable("not now")
        return super().list(*arguments, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        if self.rng.random() < 0.1:
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
        self.rng = random.Random(seed)
        self.store = NameStore(lambda: self.now)
        if how == "flaky":
            self.store = FlakyStore(lambda: self.now, self.rng)
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
        self.claims.cap.note_foreign({})
        self.unwritten: list[int] = []
        self.known: set[int] = set()
        self.written: dict[int, float] = {}
        self.heard: list[tuple[Grant, set[int], float]] = []
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

    def apply(self) -> None:
        if self.heard:
            standing, self.known, when = self.heard.pop(0)
            self.known |= {*self.unwritten, *(b for b, at in self.written.items() if at >= when)}
            self.budget.used = len(self.known)
            self.budget.apply(standing)

    def store(self) -> None:
        wanted = self.world.rng.randint(1, 4)
        count, _ = self.budget.hold(wanted)
        if count < wanted and not self.budget.alone:
            self.budget.note_refused(wanted - count)
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
        step = self.world.rng.choice(
            [self.look, self.apply, self.store, self.store, self.write_down, self.evict]
        )
        step()
