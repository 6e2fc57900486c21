"""The object tier over a store that fails, lies and stalls at random, by a seed.

The fault model, at any call of the `Store` interface:

- REFUSED    the call fails as weather does, and has done nothing;
- CUT        the call is carried out, but its answer is lost: the caller sees weather;
- SLOW_DOWN  the store asks for fewer requests;
- FULL       a put fails for the lack of room;
- FLIPPED    one bit of what a get returns is wrong;
- DENIED     an object that is there is said to be missing.
"""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from object_subjects import FolderSubject

from kvtier.backends.object import BACKEND, ObjectHandler, ObjectSettings, ObjectTier
from kvtier.backends.object.stores.errors import (
    RateLimited,
    StoreError,
    StoreFull,
    TimedOut,
    Unavailable,
)
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome, Store
from kvtier.core.interfaces.backend import TierContext
from kvtier.core.settings import TierSettings
from kvtier.core.system.disk import Disk
from kvtier.testing.fault_suite import BLOCKS, walk
from kvtier.testing.records import make_keys
from kvtier.testing.subject import Rig
from kvtier.types import BlockKey

_T = TypeVar("_T")


class Fault(enum.Enum):
    REFUSED = "refused"
    CUT = "cut"
    SLOW_DOWN = "slow_down"
    FULL = "full"
    FLIPPED = "flipped"
    DENIED = "denied"


class FaultPlan:
    """What happens to the next call; shared by the stores of a tier and its handler."""

    def __init__(self, seed: int) -> None:
        self.rate = 0.0
        self.kinds: Sequence[Fault] = tuple(Fault)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    def next(self) -> Fault | None:
        with self._lock:
            return self._rng.choice(self.kinds) if self._rng.random() < self.rate else None

    def below(self, limit: int) -> int:
        with self._lock:
            return self._rng.randrange(limit)


class FaultyStore(Store):
    """The real store, with the faults of a plan."""

    def __init__(self, inner: Store, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def _call(self, call: Callable[[], _T], fault: Fault | None) -> _T:
        if fault is Fault.REFUSED:
            raise Unavailable("refused")
        if fault is Fault.SLOW_DOWN:
            raise RateLimited("slow down")
        answer = call()
        if fault is Fault.CUT:
            raise TimedOut("the answer is lost")
        return answer

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        fault = self._plan.next()
        if fault is Fault.FULL:
            raise StoreFull("full")
        return self._call(lambda: self._inner.put(name, buffers, **more), fault)

    def get(self, name: str, into: Sequence[Buffer], **more: Any) -> int | None:
        fault = self._plan.next()
        if fault is Fault.DENIED:
            return None
        found = self._call(lambda: self._inner.get(name, into, **more), fault)
        views = [view for view in into if len(view)]
        if fault is Fault.FLIPPED and views:
            view = views[self._plan.below(len(views))]
            view[self._plan.below(len(view))] ^= 1 << self._plan.below(8)
        return found

    def head(self, name: str, **more: Any) -> ObjectInfo | None:
        fault = self._plan.next()
        if fault is Fault.DENIED:
            return None
        return self._call(lambda: self._inner.head(name, **more), fault)

    def list(self, *names: Any, **more: Any) -> Iterator[ObjectInfo]:
        for info in self._inner.list(*names, **more):
            self._call(lambda: None, self._plan.next())
            yield info

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        fault = self._plan.next()
        return self._call(lambda: self._inner.delete(names, **more), fault)


class FaultySubject(FolderSubject):
    """A folder with faults, while their rate is not 0."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> ObjectTier:
        assert isinstance(settings, ObjectSettings)
        store = FaultyStore(self._store(settings, disk), self.plan)
        return BACKEND.open_tier(settings, context, store)

    def open_handler(
        self, settings: TierSettings, context: TierContext, disk: Disk
    ) -> ObjectHandler:
        assert isinstance(settings, ObjectSettings)
        store = FaultyStore(self._store(settings, disk), self.plan)
        return BACKEND.open_handler(settings, context, store)


def serves_again(rig: Rig) -> list[BlockKey]:
    """Blocks that it has taken after its store went well again, and gives back."""
    for _ in range(3):  # what was thought lost is found, then the surplus goes, then copies
        rig.settle()
    new = make_keys(BLOCKS, start=1000)
    assert rig.put(new) == new
    assert rig.get(new) == new
    return new


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [*Fault, None], ids=lambda kind: kind.value if kind else "all")
def test_right_bytes_or_a_miss_and_full_service_afterwards(
    tmp_path: Path, kind: Fault | None, seed: int
) -> None:
    plan = FaultPlan(seed)
    plan.kinds = [kind] if kind else tuple(Fault)
    rig = Rig(FaultySubject(plan), tmp_path, blocks=BLOCKS)
    plan.rate = 0.25
    walk(rig, random.Random(seed), steps=60)
    plan.rate = 0.0
    new = serves_again(rig)
    stats = rig.tier.stats()
    assert stats.in_flight == stats.pinned == 0
    rig.reopen()
    assert rig.get(new) == new
    rig.close()


@pytest.mark.parametrize("kind", [Fault.REFUSED, Fault.SLOW_DOWN, Fault.CUT, Fault.DENIED])
def test_a_store_that_always_fails_is_a_tier_that_misses(tmp_path: Path, kind: Fault) -> None:
    plan = FaultPlan(1)
    rig = Rig(FaultySubject(plan), tmp_path, blocks=BLOCKS)
    plan.kinds, plan.rate = [kind], 1.0
    walk(rig, random.Random(1), steps=30)
    plan.rate = 0.0
    serves_again(rig)
    rig.close()
