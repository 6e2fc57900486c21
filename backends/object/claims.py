"""Claims: how writers that know each other only by a store share one budget.

    claims/<namespace>-<writer>-<number>-<bytes>-<cap>-<lease ms>-<kind><need>

A claim says all in its name, so that one listing tells of all writers. Each writer writes claims of
its own and nobody else's; a new one replaces the last. `bytes` is what may be there of this writer
beyond what manifests tell, `cap` what its whole namespace may hold.

To take more, a writer publishes a higher claim and THEN reads all claims, and after them the
manifests. Only if everything fits together it uses what it has claimed. Of two who do so at once,
the one whose claim came later sees the other's: at no order of events do both use room that is
there but once. That needs a store that lists what has been written (S3, Ceph, a folder do), and
neither conditional puts nor clocks that agree.

A claim is a lease: whoever does not renew it in time must not write any more, and finds that out
from a clock of its own. Ages are compared by the store's clock alone. The claim of a writer that
died stays counted until somebody has listed everything there is, after its death.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.backends.object import writers
from kvtier.backends.object.budget import Budget, Standing, clock
from kvtier.backends.object.store import Store

PREFIX = "claims/"
LEASE_S = 60.0
_RENEW_SHARE = 4
_TRIES = 3
_DEAD_FACTOR = 1.25
_DEAD_GRACE_S = 1.0
"""Stores tell times in whole seconds."""
_CLAIM = re.compile(
    r"claims/([0-9a-f]{32})-([0-9a-f]{32})-([0-9]{10})-([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,9})"
    r"-([asc])([hn])"
)
_ALONE, _SHARING, _CLOSED = "a", "s", "c"


class Claim(msgspec.Struct, frozen=True):
    """One claim; of several of one writer the highest figures count."""

    namespace: str
    writer: str
    number: int
    bytes: int
    cap: int
    lease_ms: int
    kind: str
    hungry: bool
    modified_s: float = 0.0

    @property
    def name(self) -> str:
        need = "h" if self.hungry else "n"
        return (
            f"{PREFIX}{self.namespace}-{self.writer}-{self.number:010d}-{self.bytes}-{self.cap}"
            f"-{self.lease_ms}-{self.kind}{need}"
        )

    def says(self, other: Claim) -> bool:
        """Whether it says the same, but for number and time."""
        return (self.bytes, self.cap, self.kind, self.hungry) == (
            other.bytes,
            other.cap,
            other.kind,
            other.hungry,
        )


def parse_claim(name: str, modified_s: float) -> Claim | None:
    """A claim from its name, None for anything else."""
    found = _CLAIM.fullmatch(name)
    if found is None:
        return None
    namespace, writer, number, size, cap, lease_ms, kind, need = found.groups()
    figures = int(number), int(size), int(cap), int(lease_ms)
    return Claim(namespace, writer, *figures, kind, need == "h", modified_s)


class Writer(msgspec.Struct):
    """A writer as its claims show it."""

    claim: Claim
    """The highest figures of all."""
    names: list[str]
    alive: bool


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
        self._lease_s = lease_s
        self._clock = clock
        self._number = 0
        self._mine: Claim | None = None
        self._begun_at = self._seen_at = 0.0
        self._cap = 0
        self._foreign: dict[str, int] = {}
        self.measured = False
        """Whether it is known what other namespaces hold."""
        self._fresh = False

    # -- renewing --------------------------------------------------------------------------------

    def renew(self) -> tuple[Standing, list[str]]:
        """Claim what is needed and see whether it fits; also the claims of the dead, which `bury`
        takes after an audit. Raises StoreError. What manifests say must be read after it."""
        seen = self._read()
        if self._mine is not None and self.writer not in seen:
            self._begin_anew()  # somebody took us for dead
        elif self._clock() >= self._begun_at + self._lease_s:
            self.measured = False  # others may have come and gone unseen
        for _ in range(_TRIES):
            alone = not self._neighbours(seen)
            wish = self._wish(seen, alone=alone)
            if self._mine is None or not wish.says(self._mine) or self._due():
                seen = self._publish(wish)
            if alone == (not self._neighbours(seen)):
                break  # else somebody came or went at this moment
        self._grant(wish.cap, seen)
        return self._standing(seen), self._buriable(seen)

    def _begin_anew(self) -> None:
        self._mine = None
        self._cap = 0
        self.measured = False
        self._budget.withdraw()

    def _due(self) -> bool:
        return self._clock() - self._begun_at > self._lease_s / _RENEW_SHARE

    def _wish(self, seen: Mapping[str, Writer], *, alone: bool) -> Claim:
        living = sum(one.alive for one in self._others(seen))
        size = self._budget.offer(alone=alone, writers=1 + living)
        kind = _ALONE if alone else _SHARING
        return self._claim(size, self._cap_wish(seen), kind)

    def _claim(self, size: int, cap: int, kind: str) -> Claim:
        lease_ms = int(self._lease_s * 1000)
        return Claim(self._namespace, self.writer, 0, size, cap, lease_ms, kind, self.hungry)

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
        if self._fresh and free < self._cap:
            self._cap = free  # whatever it is that lies there: what is too much must go
        self._fresh = False
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
            alone=self._mine.kind == _ALONE and not living,
            claim=self._mine.bytes,
            others=sum(claim.bytes for claim in living),
            dead=sum(one.claim.bytes for one in others if not one.alive),
            blocked=any(claim.kind == _ALONE for claim in living),
            writers=1 + len(living),
            cap=self._cap,
            measured=self.measured or self._cap > 0,
            lease_until=self._begun_at + self._lease_s,
            serial=self._budget.serial,
            settled=self._budget.settled,
        )

    # -- audits ----------------------------------------------------------------------------------

    def take_measure(self, foreign: Mapping[str, int]) -> None:
        """What a listing has found of other namespaces."""
        self._foreign = dict(foreign)
        self.measured = self._fresh = True

    def bury(self, names: Sequence[str]) -> None:
        """Drop claims of the dead: all that they left is known by now."""
        if names:
            self._store.delete(names)

    def close(self, *, clean: bool) -> None:
        """Leave the budget; raises StoreError. What may be there unknown to manifests (not
        `clean`) stays claimed, until an audit."""
        writers.ended(self.writer)
        if self._mine is not None:
            size = 0 if clean else self._mine.bytes
            self._publish(self._claim(size, self._cap, _CLOSED))

    # -- the store -------------------------------------------------------------------------------

    def _publish(self, claim: Claim) -> Mapping[str, Writer]:
        """Say this from now on; all claims, as they stand afterwards."""
        self._number += 1
        claim = msgspec.structs.replace(claim, number=self._number, modified_s=0.0)
        begun_at = self._clock()
        self._store.put(claim.name, [memoryview(b"")])
        self._mine, self._begun_at, self._seen_at = claim, begun_at, self._clock()
        return self._read()

    def _read(self) -> Mapping[str, Writer]:
        found = _by_writer(self._store)
        mine = found.pop(self.writer, [])
        # by what was published: whether a put that failed has come to something nobody knows
        number = self._mine.number if self._mine is not None else -1
        current = [claim for claim in mine if claim.number == number]
        old = [claim.name for claim in mine if claim.number != number]
        if old and current:
            self._store.delete(old)
        now = current[0].modified_s + self._clock() - self._seen_at if current else 0.0
        seen = {writer: _seen(claims, now) for writer, claims in found.items()}
        if current:
            seen[self.writer] = Writer(current[0], [current[0].name], alive=True)
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

    def _buriable(self, seen: Mapping[str, Writer]) -> list[str]:
        """Claims of the dead, but not of a namespace in which others live: they must look first."""
        living = {one.claim.namespace for one in seen.values() if one.alive}
        own = living - {self._namespace}
        return [
            name
            for one in seen.values()
            if not one.alive and one.claim.namespace not in own
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


def ended(store: Store, namespace: str) -> list[str]:
    """The claims of a namespace's writers that ended, as far as that can be told without a claim of
    one's own: of those that only stopped renewing, how old theirs are is not known. These claims
    may go when all that there is of the namespace has been deleted after this."""
    found = [_seen(claims, 0.0) for claims in _by_writer(store).values()]
    return [
        name
        for one in found
        if one.claim.namespace == namespace and not one.alive
        for name in one.names
    ]


def _by_writer(store: Store) -> dict[str, list[Claim]]:
    found: dict[str, list[Claim]] = defaultdict(list)
    for info in store.list(PREFIX):
        claim = parse_claim(info.name, info.modified_s)
        if claim is not None:
            found[claim.writer].append(claim)
    return found


def _seen(claims: Sequence[Claim], now: float) -> Writer:
    """One writer by all its claims: the highest figures count, and the youngest claim."""
    latest = max(claims, key=lambda claim: claim.number)
    claim = msgspec.structs.replace(
        latest,
        bytes=max(claim.bytes for claim in claims),
        cap=max(claim.cap for claim in claims),
        kind=_ALONE if any(c.kind == _ALONE for c in claims) else latest.kind,
        modified_s=max(claim.modified_s for claim in claims),
    )
    age = now - claim.modified_s
    late = age > _DEAD_FACTOR * claim.lease_ms / 1000 + _DEAD_GRACE_S
    alive = latest.kind != _CLOSED and not late and writers.may_live(claim.writer)
    return Writer(claim, [claim.name for claim in claims], alive)
