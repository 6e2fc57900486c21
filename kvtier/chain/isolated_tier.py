"""A fence around a tier of another package, whose mistakes must not cost the tiers beside it.

The chain relies on it that nothing in a tier raises (`Tier`): between two calls that belong
together, pins and reservations would stay for good. What breaks that promise is not asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TypeVar

from kvtier.errors import NotResident
from kvtier.interfaces.tier import Tier
from kvtier.types import (
    BlockKey,
    Fate,
    FilePlace,
    LoadStoreSpec,
    Outcome,
    Presence,
    Reservation,
    TierEvent,
    TierStats,
)

T = TypeVar("T")
Many = TypeVar("Many", bound=Sized)

logger = logging.getLogger(__name__)

_OUT = (
    "the tier %s is not used any more until this engine starts again: a mistake in %s, which "
    "another package brings; please report it there"
)


class IsolatedTier(Tier):
    """The same tier, until it raises or answers what is no answer; from then on an empty one."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.medium = tier.medium
        self.in_files = tier.in_files
        self.finds, self.strikes = tier.finds, tier.strikes
        self.learning = tier.learning
        self._stats = TierStats(tier.medium)

    def _ask(self, call: Callable[[], T], instead: T) -> T:
        return instead if self.out_of_use else self._try(call, instead)

    def _try(self, call: Callable[[], T], instead: T) -> T:
        try:
            return call()
        except Exception:
            if not self.out_of_use:
                logger.exception(_OUT, self.medium, type(self._tier).__module__)
            self.out_of_use = True
            return instead

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self._ask(lambda: bool(self._tier.shared), False)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Presence]:
        nowhere = [Presence.MISS] * len(keys)
        return self._ask(lambda: _as_many(self._tier.lookup(keys), keys), nowhere)

    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadStoreSpec:
        spec = self._ask(lambda: self._pin(keys), None)
        if spec is not None:
            return spec
        if keys:
            raise NotResident(f"{len(keys)} keys are not here: look up first")
        return LoadStoreSpec()

    def _pin(self, keys: Sequence[BlockKey]) -> LoadStoreSpec | None:
        try:
            return _as_many(self._tier.prepare_load(keys), keys)
        except NotResident:
            return None

    def complete_load(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        self._ask(lambda: self._tier.complete_load(keys, failed), None)

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        nothing = Reservation([], LoadStoreSpec(), [])
        return self._ask(lambda: self._reserve(keys, evict), nothing)

    def _reserve(self, keys: Sequence[BlockKey], evict: bool) -> Reservation:
        taken = self._tier.prepare_store(keys, evict=evict)
        if not set(taken.keys) <= set(keys):
            raise ValueError("a reservation of keys that were not asked for")
        _as_many(taken.spec, taken.keys)
        return taken

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        self._ask(lambda: self._tier.complete_store(keys, failed), None)

    def prepare_find(
        self, keys: Sequence[BlockKey]
    ) -> tuple[Sequence[BlockKey], LoadStoreSpec | None]:
        nothing: tuple[Sequence[BlockKey], LoadStoreSpec | None] = ([], None)
        return self._ask(lambda: self._unknown(keys), nothing)

    def _unknown(self, keys: Sequence[BlockKey]) -> tuple[Sequence[BlockKey], LoadStoreSpec | None]:
        asked, spec = self._tier.prepare_find(keys)
        return list(asked), spec if spec is None else _as_many(spec, asked)

    def complete_find(self, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> None:
        self._ask(lambda: self._tier.complete_find(keys, outcomes), None)

    def touch(self, keys: Sequence[BlockKey], start: int = 0) -> None:
        self._ask(lambda: self._tier.touch(keys, start), None)

    def victims(self, count: int) -> list[BlockKey]:
        return self._ask(lambda: list(self._tier.victims(count)), [])

    def victims_within(self, count: int, seconds: float, chance: float) -> list[BlockKey]:
        return self._ask(lambda: list(self._tier.victims_within(count, seconds, chance)), [])

    def take_hottest(self, count: int) -> Sequence[BlockKey]:
        return self._ask(lambda: list(self._tier.take_hottest(count)), [])

    def forget_hottest(self) -> None:
        self._ask(self._tier.forget_hottest, None)

    def retain_at_most(self, blocks: int) -> None:
        self._ask(lambda: self._tier.retain_at_most(blocks), None)

    def retain(self, keys: Sequence[BlockKey], session: str, until: float) -> int:
        return self._ask(lambda: int(self._tier.retain(keys, session, until)), len(keys))

    def release(self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True) -> None:
        self._ask(lambda: self._tier.release(session, keys, all=all), None)

    def retained_for(self, session: str) -> Sequence[BlockKey]:
        return self._ask(lambda: list(self._tier.retained_for(session)), [])

    @property
    def unwritten(self) -> bool:
        return self._ask(lambda: bool(self._tier.unwritten), False)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        self._try(lambda: self._tier.forget(keys), None)  # always: it may outlive this process

    def clear(self) -> None:
        self._try(self._tier.clear, None)

    def take_events(self) -> list[TierEvent]:
        return self._ask(lambda: list(self._tier.take_events()), [])

    def take_lost(self) -> Sequence[tuple[Sequence[BlockKey], Fate]]:
        return self._ask(self._take_lost, ())

    def _take_lost(self) -> Sequence[tuple[Sequence[BlockKey], Fate]]:
        lost = [(list(keys), fate) for keys, fate in self._tier.take_lost()]
        if not all(isinstance(fate, Fate) for _, fate in lost):
            raise TypeError("what a tier lost has a Fate each")
        return lost

    def stats(self) -> TierStats:
        self._stats = self._ask(self._count, self._stats)
        return self._stats

    def _count(self) -> TierStats:
        found = self._tier.stats()
        if not isinstance(found, TierStats):
            raise TypeError(f"stats are a TierStats, not {found!r}")
        return found

    def give_up(self, keys: Sequence[BlockKey]) -> None:
        self._ask(lambda: self._tier.give_up(keys), None)

    def arrived(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return self._ask(lambda: list(self._tier.arrived(keys)), [])

    def files(self, spec: LoadStoreSpec) -> list[FilePlace]:
        none = [FilePlace("", 0)] * len(spec)  # which whoever reads it finds out
        return self._ask(lambda: _as_many(self._tier.files(spec), spec), none)

    @property
    def recovered(self) -> int:
        return self._ask(lambda: int(self._tier.recovered), 0)

    def take_recovered(self, count: int) -> tuple[Sequence[BlockKey], Sequence[int]]:
        nothing: tuple[Sequence[BlockKey], Sequence[int]] = ([], [])
        return self._ask(lambda: self._take_recovered(count), nothing)

    def _take_recovered(self, count: int) -> tuple[Sequence[BlockKey], Sequence[int]]:
        keys, uses = self._tier.take_recovered(count)
        return list(keys), list(_as_many(uses, keys))

    def forget_recovered(self) -> None:
        self._ask(self._tier.forget_recovered, None)

    def tick(self) -> None:
        self._ask(self._tier.tick, None)
        self.learning = self._ask(lambda: bool(self._tier.learning), False)
        self.unwell = self._ask(lambda: bool(self._tier.unwell), False)

    # Not for an engine's scheduler: what goes wrong here is for who has called.

    def refresh(self) -> None:
        self._tier.refresh()

    def flush(self) -> None:
        self._tier.flush()

    def carry_uses(self, used: Mapping[BlockKey, tuple[int, float]]) -> None:
        self._tier.carry_uses(used)

    def close(self) -> None:
        self._tier.close()


def _as_many(answer: Many, asked: Sized) -> Many:
    if len(answer) != len(asked):
        raise ValueError(f"{len(answer)} answers to {len(asked)} keys")
    return answer
