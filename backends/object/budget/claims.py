"""Claims: how writers that know each other only by a store share one budget.

    claims/<namespace>-<writer>-<number>-<bytes>-<cap>-<capacity>-<lease ms>-<kind><need>

A claim says all in its name, so one listing shows all of them. Each writer writes only its own
claims, and a new one replaces the last. `bytes` is what may be in the store of this writer beyond
what manifests list. `cap` is what its whole namespace may hold. `capacity` is what its settings
allow to all namespaces together: where settings differ, the largest of the living writers counts.
Otherwise a writer with a smaller one would empty the store of the others, or would get no room.

To take more, a writer publishes a higher claim, THEN reads all claims, and after them the
manifests. It uses what it has claimed only if everything fits together. Of two writers that do so
at once, the one whose claim came later sees the other's, so no order of events lets both use the
same room. A store may list late, as long as it lists all that was written before what it shows: a
claim is used only when it is listed, and if it was not listed at once, its room is used only once.
No conditional puts are needed, and no clocks that agree.

A claim is a lease: a writer that does not renew it in time must not write any more, and finds that
out from its own clock. Ages of claims are compared by the store's clock alone. The claim of a dead
writer stays counted until some writer has listed everything after its death.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.backends.object import writer_ids
from kvtier.backends.object.budget.budget import Budget, Grant, clock
from kvtier.backends.object.budget.claim import (
    ALONE,
    CLOSED,
    SHARING,
    Claim,
    Writer,
    claims_by_writer,
    writer_of,
)
from kvtier.backends.object.budget.namespace_cap import NamespaceCap
from kvtier.backends.object.stores.errors import StoreFull
from kvtier.backends.object.stores.store import Store

LEASE_S = 60.0
_RENEW_SHARE = 4
_ATTEMPTS = 3


class Claims:
    """Publishes and reads the claims of one writer. One thread at a time."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        budget: Budget,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = clock,
    ) -> None:
        self.writer = writer_ids.new_writer_id()
        self.cap = NamespaceCap(namespace, budget)
        self._store = store
        self._namespace = namespace
        self._budget = budget
        self._lease_s = lease_s
        self._clock = clock
        self._number = 0
        self._mine: Claim | None = None
        self._published_at = self._seen_at = self._store_s = 0.0
        self._listed = False
        """Whether the last listing showed our claim."""
        self._was_listed = False
        """Whether any listing has shown it since it is ours."""
        self._listed_late = False
        """Whether the listing after its publication did not show it."""
        self._settled = 0
        """`Budget.settled` when it was published."""
        self._wished_cap = 0

    # -- renewing --------------------------------------------------------------------------------

    def renew(self) -> tuple[Grant | None, list[str]]:
        """Claim what is needed, and see whether it fits; raises StoreError.

        Returns what may be used, or None if the store does not list the claim yet, or is so full
        that it takes no claim. Also returns the claims of dead writers, which `drop_dead` takes
        after an audit. Manifests must be read after this call.
        """
        seen = self._read()
        if self._is_lost(seen):
            self._begin_anew()  # another writer took us for dead
        elif self._has_lapsed():
            self.cap.measured = False  # others may have come and gone unseen
        for _ in range(_ATTEMPTS):
            alone = not self._neighbours(seen)
            wish = self._wish(seen, alone=alone)
            if self._mine is None or self._due() or (self._listed and not self._suits(wish)):
                try:
                    seen = self._publish(wish)
                except StoreFull:  # nothing can be stored, but all that is there can be served
                    return None, []
            if alone == (not self._neighbours(seen)):
                break  # else a writer came or went at this moment
        if not self._listed:
            return None, []
        self.cap.raise_to(self._wished_cap, seen, self._others(seen))
        return self._grant(seen), self._droppable(seen)

    def renew_if_due(self) -> None:
        """Renew the claim that we have; raises StoreError. Nothing more is used until the next
        `renew`."""
        if self._mine is not None and self._due():
            self.renew()

    def _suits(self, wish: Claim) -> bool:
        """Whether our claim still says what we want. If others see late what we write to manifests,
        room that has been used must be claimed anew."""
        assert self._mine is not None
        stale = self._listed_late and self._budget.settled > self._settled
        return wish.same_content(self._mine) and not stale

    def _is_lost(self, seen: Mapping[str, Writer]) -> bool:
        """Whether our claim was deleted, and is not only listed late."""
        if self._mine is None or self._listed:
            return False
        return self._has_lapsed() or (self._was_listed and self.writer not in seen)

    def _has_lapsed(self) -> bool:
        return self._clock() >= self._published_at + self._lease_s

    def _begin_anew(self) -> None:
        self._mine = None
        self._was_listed = False
        self.cap.reset()
        self._budget.revoke()

    def _due(self) -> bool:
        return self._clock() - self._published_at > self._lease_s / _RENEW_SHARE

    def _wish(self, seen: Mapping[str, Writer], *, alone: bool) -> Claim:
        others = self._others(seen)
        caps = [one.claim.cap for one in others if one.alive]
        self._wished_cap = self.cap.wish(seen, others)
        least = min([self._wished_cap, *filter(None, caps)])  # a cap of 0 is not known yet
        size = self._budget.size_claim(alone=alone, writers=1 + len(caps), cap=least)
        return self._claim(size, self._wished_cap, ALONE if alone else SHARING)

    def _claim(self, size: int, cap: int, kind: str) -> Claim:
        return Claim(
            self._namespace,
            self.writer,
            number=0,
            bytes=size,
            cap=self._budget.published_cap(cap),
            lease_ms=int(self._lease_s * 1000),
            kind=kind,
            needs_room=self.cap.needs_room,
            capacity=self.cap.own_capacity,
        )

    def _grant(self, seen: Mapping[str, Writer]) -> Grant:
        assert self._mine is not None
        others = self._others(seen)
        living = [one.claim for one in others if one.alive]
        return Grant(
            alone=self._mine.kind == ALONE and not living,
            claim=self._mine.bytes,
            others=sum(claim.bytes for claim in living),
            dead=sum(one.claim.bytes for one in others if not one.alive),
            blocked=any(claim.kind == ALONE for claim in living),
            writers=1 + len(living),
            cap=self.cap.bytes,
            measured=self.cap.measured or self.cap.bytes > 0,
            lease_until=self._published_at + self._lease_s,
            serial=self._budget.serial,
            settled=self._settled if self._listed_late else self._budget.settled,
        )

    # -- audits ----------------------------------------------------------------------------------

    def drop_dead(self, names: Sequence[str]) -> None:
        """Delete claims of dead writers: an audit has found all that they left."""
        if names:
            self._store.delete(names)

    def store_time(self) -> float:
        """The time by the store's clock, as far as it is known."""
        return self._store_s + self._clock() - self._seen_at

    def store_time_before(self, age_s: float | None) -> float:
        """The time by the store's clock so long ago; minus infinity for None."""
        return -math.inf if age_s is None else self.store_time() - age_s

    def close(self, *, clean: bool) -> None:
        """Leave the budget; raises StoreError. If not `clean`, manifests may lack objects of ours,
        and their room stays claimed until an audit."""
        writer_ids.mark_ended(self.writer)
        if self._mine is not None:
            last = self._mine
            self._put(self._claim(0 if clean else last.bytes, self.cap.bytes, CLOSED))
            self._store.delete([last.name])

    # -- the store -------------------------------------------------------------------------------

    def _put(self, claim: Claim) -> None:
        self._number += 1
        claim = msgspec.structs.replace(claim, number=self._number)
        published_at, settled = self._clock(), self._budget.settled
        self._store.put(claim.name, [memoryview(b"")])
        self._mine, self._published_at, self._seen_at = claim, published_at, self._clock()
        self._settled, self._store_s = settled, 0.0

    def _publish(self, claim: Claim) -> Mapping[str, Writer]:
        """Publish a claim; all claims as they are listed afterwards."""
        self._put(claim)
        seen = self._read()
        self._listed_late = not self._listed
        return seen

    def _read(self) -> Mapping[str, Writer]:
        found = claims_by_writer(self._store)
        mine = found.pop(self.writer, [])
        # only a claim whose put succeeded counts: what a failed put did is not known
        number = self._mine.number if self._mine is not None else -1
        current = [claim for claim in mine if claim.number == number]
        old = [claim.name for claim in mine if claim.number != number]
        self._listed = bool(current)
        self._was_listed |= bool(mine)
        if old and current:
            self._store.delete(old)
        self._store_s = current[0].modified_s if current else 0.0
        now = self.store_time() if current else 0.0
        seen = {writer: writer_of(claims, now) for writer, claims in found.items()}
        self.cap.agree_capacity(seen)
        if mine:
            seen[self.writer] = Writer(mine[0], [], alive=True)
        return seen

    def _others(self, seen: Mapping[str, Writer]) -> list[Writer]:
        """Other writers of this namespace."""
        return [
            one
            for writer, one in seen.items()
            if one.claim.namespace == self._namespace and writer != self.writer
        ]

    def _neighbours(self, seen: Mapping[str, Writer]) -> bool:
        return any(one.alive for one in self._others(seen))

    def _droppable(self, seen: Mapping[str, Writer]) -> list[str]:
        """Claims of dead writers, except in namespaces where others live: those audit first."""
        living = {one.claim.namespace for one in seen.values() if one.alive}
        elsewhere = living - {self._namespace}
        return [
            name
            for one in seen.values()
            if not one.alive and one.claim.namespace not in elsewhere
            for name in one.names
        ]
