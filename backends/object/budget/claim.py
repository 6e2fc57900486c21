"""One claim, which says all in its name, and what the claims of one writer say (see claims.py)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from kvtier.backends.object import writer_ids
from kvtier.backends.object.stores.store import ObjectInfo, Store, bounded

PREFIX = "claims/"
_CLAIMS_MAX = 1 << 18
_DEAD_FACTOR = 1.25
_DEAD_GRACE_S = 1.0
"""Stores state times in whole seconds."""
_CLAIM = re.compile(
    r"claims/([0-9a-f]{32})-([0-9a-f]{32})-([0-9]{10})-([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,19})"
    r"-([0-9]{1,9})-([asc])([hn])"
)
ALONE, SHARING, CLOSED = "a", "s", "c"


class Claim(msgspec.Struct, frozen=True):
    """One claim."""

    namespace: str
    writer: str
    number: int
    bytes: int
    """What may be in the store of this writer beyond what manifests list."""
    cap: int
    """What the namespace may hold."""
    lease_ms: int
    kind: str
    needs_room: bool
    """Whether other namespaces leave too little room."""
    modified_s: float = 0.0
    capacity: int = 0
    """Of all that lies below the url, by the writer's settings."""

    @property
    def name(self) -> str:
        need = "h" if self.needs_room else "n"
        return (
            f"{PREFIX}{self.namespace}-{self.writer}-{self.number:010d}-{self.bytes}-{self.cap}"
            f"-{self.capacity}-{self.lease_ms}-{self.kind}{need}"
        )

    def same_content(self, other: Claim) -> bool:
        """Whether both say the same of this writer at different times."""
        mine = (self.bytes, self.cap, self.kind, self.needs_room)
        return mine == (other.bytes, other.cap, other.kind, other.needs_room)


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
    """The highest figures of all its claims."""
    names: list[str]
    alive: bool


def claims_of_ended_writers(store: Store, namespace: str) -> list[str]:
    """The claims of writers of a namespace that have ended for certain.

    Without a claim of one's own the store's time is not known, so a writer that only stopped
    renewing its claim does not count. The claims may be deleted after all objects of the namespace.
    """
    found = [writer_of(claims, 0.0) for claims in claims_by_writer(store).values()]
    return [
        name
        for one in found
        if one.claim.namespace == namespace and not one.alive
        for name in one.names
    ]


def abandoned_claims(
    store: Store, namespace: str, now_s: float, grace_s: float
) -> list[str] | None:
    """The claims of a namespace in which nobody has written for `grace_s`; None if somebody may
    still write. `now_s` is not later than the store's own time."""
    found: dict[str, list[Claim]] = defaultdict(list)
    for info in _listed(store, f"{PREFIX}{namespace}-"):
        claim = parse_claim(info.name, info.modified_s)
        if claim is None or now_s - info.modified_s < grace_s:
            return None
        found[claim.writer].append(claim)
    seen = [writer_of(claims, now_s) for claims in found.values()]
    return None if any(one.alive for one in seen) else [name for one in seen for name in one.names]


def claims_by_writer(store: Store) -> dict[str, list[Claim]]:
    """All claims in the store."""
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
    alive = latest.kind != CLOSED and not late and writer_ids.may_live(claim.writer)
    return Writer(claim, [claim.name for claim in claims], alive)
