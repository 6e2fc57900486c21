"""Claims: how writers that know each other only by a store share one budget.

    claims/<namespace>-<writer>-<number>-<bytes>-<cap>-<capacity>-<lease ms>-<kind><need>

A claim says all in its name, so that one listing tells of all writers. Each writer writes claims of
its own and nobody else's; a new one replaces the last. `bytes` is what may be there of this writer
beyond what manifests tell, `cap` what its whole namespace may hold, `capacity` what its settings
allow to all namespaces together: where those differ, the largest of the living counts, so that
nobody who comes with a smaller one empties the store of the others, or gets nothing himself.

To take more, a writer publishes a higher claim and THEN reads all claims, and after them the
manifests. Only if everything fits together it uses what it has claimed. Of two who do so at once,
the one whose claim came later sees the other's: at no order of events do both use room that is
there but once. A store may list late, as long as it lists all that was written before what it
shows: nothing is taken by a claim until it is listed, and if it was not listed at once, nothing
twice. It needs neither conditional puts nor clocks that agree.

A claim is a lease: whoever does not renew it in time must not write any more, and finds that out
from a clock of its own. Ages are compared by the store's clock alone. The claim of a writer that
died stays counted until somebody has listed everything there is, after its death.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.backends.object.budget import writers
from kvtier.backends.object.budget.budget import UNLIMITED, Budget, Standing, clock
from kvtier.backends.object.budget.claim import (
    ALONE,
    CLOSED,
    SHARING,
    Claim,
    Writer,
    by_writer,
    writer_of,
)
from kvtier.backends.object.stores.errors import StoreFull
from kvtier.backends.object.stores.store import Store
from kvtier.core.settings import ByteSize

_log = logging.getLogger(__name__)

LEASE_S = 60.0
_RENEW_SHARE = 4
_TRIES = 3


class Claims:
    """The claims of one prefix, as one writer publishes and reads them. One thread at a time."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        budget: Budget,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = clock,
    ) -> None:
        self.hungry = False
        """Whether other namespaces leave too little room."""
        self.writer = writers.new()
        self._store = store
        self._namespace = namespace
        self._budget = budget
        self._capacity = budget.capacity
        """By our own settings."""
        self._said_larger = self._fell = False
        self._lease_s = lease_s
        self._clock = clock
        self._number = 0
        self._mine: Claim | None = None
        self._begun_at = self._seen_at = self._store_s = 0.0
        self._shown = self._was_shown = False
        """Whether the last listing had our claim, and whether any had one since it is ours."""
        self._late = False
        """Whether the store did not list our claim at once."""
        self._settled = 0
        """How much had been settled when it was published."""
        self._cap = self._wished = 0
        self._foreign: dict[str, int] = {}
        self._found: dict[str, int] = {}
        """The same by the last listing alone."""
        self.measured = False
        """Whether it is known what other namespaces hold."""
        self._fresh = False

    # -- renewing --------------------------------------------------------------------------------

    def renew(self) -> tuple[Standing | None, list[str]]:
        """Claim what is needed and see whether it fits (None: the store does not list it yet, or is
        so full that it takes no claim); also the claims of the dead, which `bury` takes after an
        audit. Raises StoreError. What manifests say must be read after it."""
        seen = self._read()
        if self._is_lost(seen):
            self._begin_anew()  # somebody took us for dead
        elif self._has_lapsed():
            self.measured = False  # others may have come and gone unseen
        for _ in range(_TRIES):
            alone = not self._neighbours(seen)
            wish = self._wish(seen, alone=alone)
            if self._mine is None or self._due() or (self._shown and not self._suits(wish)):
                try:
                    seen = self._publish(wish)
                except StoreFull:  # nothing can be stored, and all that is there be served
                    return None, []
            if alone == (not self._neighbours(seen)):
                break  # else somebody came or went at this moment
        if not self._shown:
            return None, []
        self._grant(self._wished, seen)
        return self._standing(seen), self._buriable(seen)

    def keep(self) -> None:
        """Renew a claim that we have; raises StoreError. What it allows is found at the next look:
        nothing more is used until then."""
        if self._mine is not None and self._due():
            self.renew()

    def _suits(self, wish: Claim) -> bool:
        """Whether what we claim is what we want. Where others see late what we have written down,
        room that it was written to must be claimed anew."""
        assert self._mine is not None
        return wish.says(self._mine) and not (self._late and self._budget.settled > self._settled)

    def _is_lost(self, seen: Mapping[str, Writer]) -> bool:
        """Whether our claim is gone, and not only listed late."""
        if self._mine is None or self._shown:
            return False
        return self._has_lapsed() or (self._was_shown and self.writer not in seen)

    def _has_lapsed(self) -> bool:
        return self._clock() >= self._begun_at + self._lease_s

    def _begin_anew(self) -> None:
        self._mine = None
        self._was_shown = False
        self._cap = 0
        self.measured = False
        self._budget.withdraw()

    def _due(self) -> bool:
        return self._clock() - self._begun_at > self._lease_s / _RENEW_SHARE

    def _wish(self, seen: Mapping[str, Writer], *, alone: bool) -> Claim:
        caps = [one.claim.cap for one in self._others(seen) if one.alive]
        self._wished = self._cap_wish(seen)
        least = min([self._wished, *filter(None, caps)])  # a cap of 0 is not known yet
        size = self._budget.offer(alone=alone, writers=1 + len(caps), cap=least)
        return self._claim(size, self._wished, ALONE if alone else SHARING)

    def _claim(self, size: int, cap: int, kind: str) -> Claim:
        lease_ms, cap = int(self._lease_s * 1000), self._budget.told(cap)
        figures = 0, size, cap, lease_ms
        return Claim(
            self._namespace, self.writer, *figures, kind, self.hungry, capacity=self._capacity
        )

    def _cap_wish(self, seen: Mapping[str, Writer]) -> int:
        capacity = self._budget.capacity
        free = max(0, capacity - self._foreign_bytes(seen))
        if not self.measured:
            # what writers of this namespace have found to fit still does, while their claims stand
            caps = [one.claim.cap for one in self._others(seen)]
            return min(capacity, max([self._cap, *caps]))
        spaces = {one.claim.namespace for one in seen.values() if one.alive}
        fair = capacity // len(spaces | {self._namespace})
        self.hungry = self.hungry and self._cap < fair
        poor = any(
            one.alive and one.claim.hungry and one.claim.cap < fair
            for one in seen.values()
            if one.claim.namespace != self._namespace
        )
        if self._fresh:
            # What is too much must go; but who writes claims has found room beside ours.
            unclaimed = sum(size for space, size in self._found.items() if space not in spaces)
            self._cap = min(self._cap, max(0, capacity - unclaimed))
        self._fresh = False
        if self._fell:  # whoever had the larger capacity has gone: what is left is shared anew
            self._cap = min(self._cap, max(free, fair))
        self._fell = False
        if not poor:
            return max(free, self._cap)
        if self._cap > fair:
            self._cap = self._budget.lower(fair)
        return max(self._cap, min(free, fair))

    def _grant(self, wished: int, seen: Mapping[str, Writer]) -> None:
        """Use a higher cap if it is found to fit."""
        if wished <= self._cap:
            return
        if self.measured:
            free = self._budget.capacity - self._foreign_bytes(seen)
        else:
            free = max((one.claim.cap for one in self._others(seen)), default=0)
        self._cap = max(self._cap, min(wished, free))

    def _standing(self, seen: Mapping[str, Writer]) -> Standing:
        assert self._mine is not None
        others = self._others(seen)
        living = [one.claim for one in others if one.alive]
        return Standing(
            alone=self._mine.kind == ALONE and not living,
            claim=self._mine.bytes,
            others=sum(claim.bytes for claim in living),
            dead=sum(one.claim.bytes for one in others if not one.alive),
            blocked=any(claim.kind == ALONE for claim in living),
            writers=1 + len(living),
            cap=self._cap,
            measured=self.measured or self._cap > 0,
            lease_until=self._begun_at + self._lease_s,
            serial=self._budget.serial,
            settled=self._settled if self._late else self._budget.settled,
        )

    # -- audits ----------------------------------------------------------------------------------

    def take_measure(self, foreign: Mapping[str, int]) -> None:
        """What a listing has found of other namespaces."""
        self._foreign, self._found = dict(foreign), dict(foreign)
        self.measured = self._fresh = True

    def bury(self, names: Sequence[str]) -> None:
        """Drop claims of the dead: all that they left is known by now."""
        if names:
            self._store.delete(names)

    def store_now(self) -> float:
        """The time by the store's clock, as far as we have seen it."""
        return self._store_s + self._clock() - self._seen_at

    def long_ago(self, age_s: float | None) -> float:
        """What the store's clock said so long ago; where nobody asks, before all that there is."""
        return -math.inf if age_s is None else self.store_now() - age_s

    def close(self, *, clean: bool) -> None:
        """Leave the budget; raises StoreError. What may be there unknown to manifests (not
        `clean`) stays claimed, until an audit."""
        writers.ended(self.writer)
        if self._mine is not None:
            last = self._mine
            self._put(self._claim(0 if clean else last.bytes, self._cap, CLOSED))
            self._store.delete([last.name])

    # -- the store -------------------------------------------------------------------------------

    def _put(self, claim: Claim) -> None:
        """Say this from now on."""
        self._number += 1
        claim = msgspec.structs.replace(claim, number=self._number)
        begun_at, settled = self._clock(), self._budget.settled
        self._store.put(claim.name, [memoryview(b"")])
        self._mine, self._begun_at, self._seen_at = claim, begun_at, self._clock()
        self._settled, self._store_s = settled, 0.0

    def _publish(self, claim: Claim) -> Mapping[str, Writer]:
        """Say this; all claims, as they stand afterwards."""
        self._put(claim)
        seen = self._read()
        self._late = not self._shown
        return seen

    def _read(self) -> Mapping[str, Writer]:
        found = by_writer(self._store)
        mine = found.pop(self.writer, [])
        # by what was published: whether a put that failed has come to something nobody knows
        number = self._mine.number if self._mine is not None else -1
        current = [claim for claim in mine if claim.number == number]
        old = [claim.name for claim in mine if claim.number != number]
        self._shown = bool(current)
        self._was_shown |= bool(mine)
        if old and current:
            self._store.delete(old)
        self._store_s = current[0].modified_s if current else 0.0
        now = self.store_now() if current else 0.0
        seen = {writer: writer_of(claims, now) for writer, claims in found.items()}
        self._agree_capacity(seen)
        if mine:
            seen[self.writer] = Writer(mine[0], [], alive=True)
        return seen

    def _agree_capacity(self, seen: Mapping[str, Writer]) -> None:
        stated = [one.claim.capacity for one in seen.values() if one.alive]
        largest = max([self._capacity, *(size for size in stated if size < UNLIMITED)])
        self._fell |= largest < self._budget.capacity
        self._budget.capacity = largest
        if largest > self._capacity and not self._said_larger:
            self._said_larger = True
            _log.warning(
                "servers that share this store have different capacities: while one runs with %s, "
                "the %s of this one do not count; write the same in all stacks",
                ByteSize(largest),
                ByteSize(self._capacity),
            )

    def _others(self, seen: Mapping[str, Writer]) -> list[Writer]:
        """Other writers of this namespace."""
        return [
            one
            for writer, one in seen.items()
            if one.claim.namespace == self._namespace and writer != self.writer
        ]

    def _neighbours(self, seen: Mapping[str, Writer]) -> bool:
        return any(one.alive for one in self._others(seen))

    def _buriable(self, seen: Mapping[str, Writer]) -> list[str]:
        """Claims of the dead, but not of a namespace in which others live: they must look first."""
        living = {one.claim.namespace for one in seen.values() if one.alive}
        elsewhere = living - {self._namespace}
        return [
            name
            for one in seen.values()
            if not one.alive and one.claim.namespace not in elsewhere
            for name in one.names
        ]

    def _foreign_bytes(self, seen: Mapping[str, Writer]) -> int:
        """What other namespaces may hold: by their claims, else as last measured or heard."""
        caps: dict[str, int] = {}
        for one in seen.values():
            namespace = one.claim.namespace
            if namespace != self._namespace:
                caps[namespace] = max(caps.get(namespace, 0), one.claim.cap)
        self._foreign.update(caps)
        return sum(self._foreign.values())
