"""One claim, which says all in its name (see claims.py), and what those of a writer say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from kvtier.backends.object.budget import writers
from kvtier.backends.object.stores.store import ObjectInfo, Store, bounded

PREFIX = "claims/"
_CLAIMS_MAX = 1 << 18
_DEAD_FACTOR = 1.25
_DEAD_GRACE_S = 1.0
"""Stores tell times in whole seconds."""
_CLAIM = re.compile(
    r"claims/([0-9a-f]{32})-([0-9a-f]{32})-([0-9]{10})-([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,19})"
    r"-([0-9]{1,9})-([asc])([hn])"
)
ALONE, SHARING, CLOSED = "a", "s", "c"


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
    capacity: int = 0
    """Of all that lies below the url, by the writer's settings."""

    @property
    def name(self) -> str:
        need = "h" if self.hungry else "n"
        return (
            f"{PREFIX}{self.namespace}-{self.writer}-{self.number:010d}-{self.bytes}-{self.cap}"
            f"-{self.capacity}-{self.lease_ms}-{self.kind}{need}"
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
    namespace, writer, number, size, cap, capacity, lease_ms, kind, need = found.groups()
    figures = int(number), int(size), int(cap), int(lease_ms)
    return Claim(namespace, writer, *figures, kind, need == "h", modified_s, int(capacity))


class Writer(msgspec.Struct):
    """A writer as its claims show it."""

    claim: Claim
    """The highest figures of all."""
    names: list[str]
    alive: bool


def ended(store: Store, namespace: str) -> list[str]:
    """The claims of a namespace's writers that ended, as far as that can be told without a claim of
    one's own: of those that only stopped renewing, how old theirs are is not known. These claims
    may go when all that there is of the namespace has been deleted after this."""
    found = [writer_of(claims, 0.0) for claims in by_writer(store).values()]
    return [
        name
        for one in found
        if one.claim.namespace == namespace and not one.alive
        for name in one.names
    ]


def abandoned(store: Store, namespace: str, now_s: float, grace_s: float) -> list[str] | None:
    """The claims of a namespace in which nobody has written for so long; None if somebody may yet.
    `now_s` is not later than it is by the store's clock."""
    found: dict[str, list[Claim]] = defaultdict(list)
    for info in _listed(store, f"{PREFIX}{namespace}-"):
        claim = parse_claim(info.name, info.modified_s)
        if claim is None or now_s - info.modified_s < grace_s:
            return None
        found[claim.writer].append(claim)
    seen = [writer_of(claims, now_s) for claims in found.values()]
    return None if any(one.alive for one in seen) else [name for one in seen for name in one.names]


def by_writer(store: Store) -> dict[str, list[Claim]]:
    """All claims below a prefix."""
    found: dict[str, list[Claim]] = defaultdict(list)
    for info in _listed(store, PREFIX):
        claim = parse_claim(info.name, info.modified_s)
        if claim is not None:
            found[claim.writer].append(claim)
    return found


def _listed(store: Store, prefix: str) -> Iterator[ObjectInfo]:
    remedy = "see that servers may delete theirs"
    return bounded(store.list(prefix), _CLAIMS_MAX, "claims", remedy)


def writer_of(claims: Sequence[Claim], now: float) -> Writer:
    """One writer by all its claims: the highest figures count, and the youngest claim."""
    latest = max(claims, key=lambda claim: claim.number)
    claim = msgspec.structs.replace(
        latest,
        bytes=max(claim.bytes for claim in claims),
        cap=max(claim.cap for claim in claims),
        kind=ALONE if any(c.kind == ALONE for c in claims) else latest.kind,
        modified_s=max(claim.modified_s for claim in claims),
    )
    age = now - claim.modified_s
    late = age > _DEAD_FACTOR * claim.lease_ms / 1000 + _DEAD_GRACE_S
    alive = latest.kind != CLOSED and not late and writers.may_live(claim.writer)
    return Writer(claim, [claim.name for claim in claims], alive)
