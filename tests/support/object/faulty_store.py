"""A store that fails, stalls and lies, by dice."""

from __future__ import annotations

import enum
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvtier.backends.object import BACKEND, ObjectHandler, ObjectSettings, ObjectTier
from kvtier.backends.object.stores.errors import (
    RateLimited,
    StoreError,
    StoreFull,
    TimedOut,
    Unavailable,
)
from kvtier.backends.object.stores.store import Buffer, ObjectInfo, PutOutcome, Store
from kvtier.interfaces.backend import TierContext
from kvtier.settings import TierSettings
from kvtier.system.disk import Disk
from support.object.object_subjects import FolderSubject

_T = TypeVar("_T")


class Fault(enum.Enum):
    """What a store may do at a call."""

    DOWN = "does not answer"
    BUSY = "says 503"
    CUT = "does it, and the answer is lost"
    FULL = "has no room"
    DENIES = "says that an object is not there"
    FLIPS = "returns a flipped bit"
    OTHER = "returns another object"
    CUT_SHORT = "returns fewer bytes than it says"
    FORGETS = "says stored, and has not"
    LISTS_LESS = "leaves an object out of a listing"
    LISTS_WRONG = "lists a wrong size or time"


class FaultPlan:
    """Which faults there are now; shared by the stores of a tier and its handler."""

    def __init__(self, seed: int) -> None:
        self.kinds: Sequence[Fault] = ()
        self.rate = 0.0
        self.happened: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._lock = threading.Lock()

    def next(self, *possible: Fault) -> Fault | None:
        """The fault of the next call, if it has one that is possible there."""
        with self._lock:
            if not self.kinds or self._dice.random() >= self.rate:
                return None
            fault = self._dice.choice(self.kinds)
            if fault not in possible:
                return None
            self.happened[fault.value] += 1
            return fault

    def below(self, limit: int) -> int:
        with self._lock:
            return self._dice.randrange(limit)


_ANY = (Fault.DOWN, Fault.BUSY, Fault.CUT)


class FaultyStore(Store):
    """The real store, with the faults of a plan."""

    def __init__(self, inner: Store, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self._names: list[str] = []

    def _call(self, call: Callable[[], _T], fault: Fault | None) -> _T:
        if fault is Fault.DOWN:
            raise Unavailable("the store is down")
        if fault is Fault.BUSY:
            raise RateLimited("slow down")
        answer = call()
        if fault is Fault.CUT:
            raise TimedOut("the answer is lost")
        return answer

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        fault = self._plan.next(*_ANY, Fault.FULL, Fault.FORGETS)
        if fault is Fault.FULL:
            raise StoreFull("no room")
        if fault is Fault.FORGETS:
            return PutOutcome.STORED
        self._names.append(name)
        return self._call(lambda: self._inner.put(name, buffers, **more), fault)

    def get(self, name: str, into: Buffer, **more: Any) -> int | None:
        lies = (Fault.DENIES, Fault.FLIPS, Fault.OTHER, Fault.CUT_SHORT)
        fault = self._plan.next(*_ANY, *lies)
        if fault is Fault.DENIES:
            return None
        if fault is Fault.OTHER and self._names:
            name = self._names[self._plan.below(len(self._names))]
        found = self._call(lambda: self._inner.get(name, into, **more), fault)
        if fault is Fault.FLIPS and into:
            into[self._plan.below(len(into))] ^= 1 << self._plan.below(8)
        if fault is Fault.CUT_SHORT and found:
            return self._plan.below(found)
        return found

    def head(self, name: str, **more: Any) -> ObjectInfo | None:
        fault = self._plan.next(*_ANY, Fault.DENIES)
        if fault is Fault.DENIES:
            return None
        return self._call(lambda: self._inner.head(name, **more), fault)

    def list(self, *names: Any, **more: Any) -> Iterator[ObjectInfo]:
        for info in self._inner.list(*names, **more):
            fault = self._plan.next(*_ANY, Fault.LISTS_LESS, Fault.LISTS_WRONG)
            self._call(lambda: None, fault)
            if fault is Fault.LISTS_WRONG:
                off = self._plan.below(1 << 20)
                yield msgspec.structs.replace(
                    info, size=info.size + off, modified_s=info.modified_s - off
                )
            elif fault is not Fault.LISTS_LESS:
                yield info

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        fault = self._plan.next(*_ANY)
        return self._call(lambda: self._inner.delete(names, **more), fault)

    def close(self) -> None:
        self._inner.close()


class FaultySubject(FolderSubject):
    """A folder as a store, with the faults of a plan."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> ObjectTier:
        assert isinstance(settings, ObjectSettings)
        store = FaultyStore(self._store(settings, disk), self._plan)
        return BACKEND.open_tier(settings, context, store)

    def open_handler(
        self, settings: TierSettings, context: TierContext, disk: Disk
    ) -> ObjectHandler:
        assert isinstance(settings, ObjectSettings)
        store = FaultyStore(self._store(settings, disk), self._plan)
        return BACKEND.open_handler(settings, context, store)
