"""What the pool is known to hold of one namespace, answered from memory.

The pool's master places and evicts for all. A tier knows what it has stored there, and what the
pool said when it was asked; both may have gone since. So a slot is only a place in this memory:
when all are taken, the tier forgets a block, and the pool keeps it.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from kvtier.eviction import EvictionPolicy
from kvtier.record.record import record_bytes
from kvtier.slab.catalogue import SlabTier
from kvtier.types import (
    BlockKey,
    EventKind,
    Fate,
    LoadStoreSpec,
    Namespace,
    Outcome,
    TierStats,
)

CONFIRMED_S = 5.0
"""For so long the pool is not asked again: half of the lease that an answer of it gives."""
_BAD_KEPT = 1 << 16


class MooncakeSpec(LoadStoreSpec, tag="mooncake"):
    """Names follow from the keys: for stores, whether a bad value may have to be replaced."""

    medium: ClassVar[str] = "mooncake"
    replace: list[bool]

    def __len__(self) -> int:
        return len(self.replace)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.replace[start:stop])

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls([each for piece in pieces for each in piece.replace])


class MooncakeTier(SlabTier):
    """A bounded memory of what a pool holds that many engines share."""

    finds = True
    strikes = 1

    def __init__(
        self,
        namespace: Namespace,
        capacity: int,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        size = record_bytes(namespace.payload_bytes)
        super().__init__("mooncake", size, policy, clock)
        slots = capacity // size
        self._key_of.extend([None] * slots)
        self._free.extend(range(slots))
        self._policy.resize(slots)
        self._confirmed = array("d", bytes(8 * slots))
        """By slot, when the pool was last known to hold its block."""
        self._bad: OrderedDict[BlockKey, None] = OrderedDict()
        """Not offered, whatever the pool says, until it is stored anew: it was dropped on purpose,
        or its value is not what it should be."""

    # -- questions -------------------------------------------------------------------------

    def prepare_find(
        self, keys: Sequence[BlockKey]
    ) -> tuple[Sequence[BlockKey], LoadStoreSpec | None]:
        asked = [key for key in dict.fromkeys(keys) if self._in_doubt(key)]
        return asked, MooncakeSpec([False] * len(asked)) if asked else None

    def _in_doubt(self, key: BlockKey) -> bool:
        slot = self._where.get(key)
        if slot is None:
            return key not in self._reserved and key not in self._bad
        return not 0 <= self._clock() - self._confirmed[slot] < CONFIRMED_S

    def complete_find(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> None:
        answers = list(zip(keys, outcomes, strict=True))
        there = [key for key, outcome in answers if outcome is Outcome.OK]
        # But not what has been stored since it was asked for.
        gone = [
            key
            for key, outcome in answers
            if outcome is Outcome.GONE and key in self._where and self._in_doubt(key)
        ]
        self._losses.add(gone, Fate.ELSEWHERE)
        self._drop(gone)
        new = [key for key in there if self._in_doubt(key) and key not in self._where]
        self._learn([key for key in new if key not in self._dropped_pinned])
        now = self._clock()
        for key in there:
            if (slot := self._where.get(key)) is not None:
                self._confirmed[slot] = now

    def _learn(self, keys: Sequence[BlockKey]) -> None:
        """The pool holds these, which somebody has stored there."""
        missing = len(keys) - len(self._free)
        if missing > 0:
            self._evict(missing, keys)
        slots = sorted(self._free.popleft() for _ in range(min(len(keys), len(self._free))))
        for slot, key in zip(slots, keys, strict=False):
            self._key_of[slot] = key
            self._where[key] = slot
        if slots:
            self._use(slots, keys[: len(slots)])
            self._events.add(EventKind.STORED, keys[: len(slots)])

    # -- what is offered no more -----------------------------------------------------------

    def _fail(self, key: BlockKey, outcome: Outcome) -> None:
        self._stats.corrupt += outcome is Outcome.CORRUPT
        if key in self._where:
            if outcome is Outcome.CORRUPT:
                self._bar([key])
            self._drop([key])

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._bar([key for key in keys if key in self._where])
        super().forget(keys)

    def clear(self) -> None:
        self._bar(list(self._where))
        super().clear()

    def _bar(self, keys: Sequence[BlockKey]) -> None:
        self._bad.update(dict.fromkeys(keys))
        while len(self._bad) > _BAD_KEPT:
            self._bad.popitem(last=False)

    # -- hooks -----------------------------------------------------------------------------

    def _locate(self, slots: list[int]) -> LoadStoreSpec:
        key_of, bad = self._key_of, self._bad
        return MooncakeSpec([key_of[slot] in bad for slot in slots])

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        now = self._clock()
        for slot, key in zip(slots, keys, strict=True):
            self._confirmed[slot] = now
            self._bad.pop(key, None)

    def stats(self) -> TierStats:
        stats = super().stats()
        stats.bytes_capacity = len(self._key_of) * self.slot_bytes
        return stats
