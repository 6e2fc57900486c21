"""What is written down about a store against what is there: the listing that rebuilds.

Finds blocks that no manifest knows (their writer died), entries without an object (somebody
deleted it), objects whose deletion was lost, and what other namespaces take of the budget. Deletes
only objects that have the names of kvtier's blocks, and only what is removed, too old, or, in other
namespaces, the oldest when the budget is exceeded.
"""

from __future__ import annotations

import heapq
import time
from array import array

import msgspec

from kvtier.backends.object import manifest
from kvtier.backends.object.bare import Bare
from kvtier.backends.object.breath import Breath
from kvtier.backends.object.manifest import Entries
from kvtier.backends.object.names import block_name, parse_block
from kvtier.backends.object.news import Rows
from kvtier.backends.object.spread import Spread, mark, marked
from kvtier.backends.object.store import ObjectInfo, Store

_YOUNG_S = 120.0
_HUNGER_SHARE = 16
"""A namespace without room asks for so much of the budget."""
_CANDIDATES_MAX = 1 << 16


class Unfinished(Exception):
    """There is more to list than there was time for."""


class Audit(msgspec.Struct, frozen=True):
    """What an audit starts from."""

    namespace: str
    entries: Entries
    """All that is written down."""
    known: Spread[None]
    """What was offered before the listing began."""
    capacity: int
    hungry: bool
    age_max_s: float | None
    read_s: float
    """How long a removed object may still be read by somebody who was told of it before."""
    now: float
    stop_at: float | None = None
    """When to give up (`time.monotonic`)."""


class Finding(msgspec.Struct):
    """What the store holds, as far as it is news."""

    orphans: Rows
    """Blocks that nobody wrote down, or of another size than stated."""
    gone: Rows
    """Known blocks without an object, or too old."""
    foreign: dict[str, int]
    """Bytes of other namespaces."""
    bare: Bare
    """What lies there beside blocks."""


class Stated:
    """What is written down about each object."""

    def __init__(self, entries: Entries, breathe: Breath) -> None:
        # one by one they are read from arrays in a third of the time
        self._kinds = entries["kind"].tobytes()
        self._times_us = array("Q", entries["time_us"].tobytes())
        self._sizes = array("Q", entries["size"].tobytes())
        self.rows: Spread[int] = Spread()
        for piece in breathe.chunks(len(entries)):
            some = entries[piece]
            keys, generations = manifest.keys_of(some), some["generation"].tolist()
            for row, key, generation in zip(
                range(piece.start, piece.stop), keys, generations, strict=False
            ):
                found = mark(key, generation)
                self.rows.part(found)[found] = row

    def of(self, found: bytes) -> tuple[int, float, int] | None:
        """Kind, time and size; None if nothing is written down."""
        row = self.rows.part(found).get(found)
        if row is None:
            return None
        return self._kinds[row], self._times_us[row] / 1e6, self._sizes[row]


class _Foreign(msgspec.Struct, frozen=True, order=True, gc=False):
    """An object of another namespace; the youngest is the least."""

    minus_modified_s: float
    size: int
    name: str


def audit(store: Store, case: Audit, breathe: Breath) -> Finding:
    """List everything and compare; raises StoreError, or Unfinished."""
    stated = Stated(case.entries, breathe)
    present: Spread[None] = Spread()
    try:
        return _compare(store, case, stated, present, breathe)
    finally:
        stated.rows.clear(breathe.rest)
        present.clear(breathe.rest)


def _compare(
    store: Store, case: Audit, stated: Stated, present: Spread[None], breathe: Breath
) -> Finding:
    finding = Finding(Rows(), Rows(), {}, Bare())
    leftovers: list[str] = []
    foreign: list[_Foreign] = []
    own_bytes = 0
    # what is said to be removed later than that would lie there uncounted until then: it is offered
    latest = case.now + manifest.SKEW_US / 1e6
    breathe.begin()
    for info in store.list():
        breathe()
        if case.stop_at is not None and time.monotonic() > case.stop_at:
            raise Unfinished
        parsed = parse_block(info.name)
        if parsed is None:
            finding.bare.see(info)
            continue
        namespace, key, generation = parsed
        finding.bare.holds(namespace)
        if namespace != case.namespace:
            finding.foreign[namespace] = finding.foreign.get(namespace, 0) + info.size
            _remember(foreign, info)
            continue
        own_bytes += info.size
        found = mark(key, generation)
        kind, at, size = stated.of(found) or (manifest.ADDED, 0.0, -1)
        # a time to come would outlast every removal
        since = max(at, min(info.modified_s, case.now))
        if kind == manifest.REMOVED and at <= latest:
            if case.now - since >= case.read_s:
                leftovers.append(info.name)
        elif case.age_max_s is not None and case.now - info.modified_s > case.age_max_s:
            leftovers.append(info.name)
        else:
            present.part(found)[found] = None
            if size != info.size or kind == manifest.REMOVED:
                finding.orphans.add(key, generation, info.size, since)
    _make_room(store, case, foreign, own_bytes, finding.foreign, breathe)
    store.delete(leftovers)
    _find_gone(store, case, stated, present, breathe, finding.gone)
    return finding


def _remember(oldest: list[_Foreign], info: ObjectInfo) -> None:
    """Keep the oldest objects of other namespaces, a bounded number of them."""
    entry = _Foreign(-info.modified_s, info.size, info.name)
    if len(oldest) < _CANDIDATES_MAX:
        heapq.heappush(oldest, entry)
    else:
        heapq.heappushpop(oldest, entry)


def _make_room(
    store: Store,
    case: Audit,
    candidates: list[_Foreign],
    own_bytes: int,
    foreign: dict[str, int],
    breathe: Breath,
) -> None:
    """Delete the oldest of other namespaces, their share of what is too much."""
    foreign_bytes = sum(foreign.values())
    total = own_bytes + foreign_bytes
    surplus = max(0, total - case.capacity)
    if case.hungry:
        surplus = max(surplus, total + case.capacity // _HUNGER_SHARE - case.capacity)
    if surplus <= 0 or not foreign_bytes:
        return
    share = min(foreign_bytes, surplus * foreign_bytes // total + 1)
    chosen_bytes = sum(one.size for one in candidates)
    while candidates and chosen_bytes - candidates[0].size >= share:
        breathe()
        chosen_bytes -= heapq.heappop(candidates).size
    failed = store.delete([one.name for one in candidates])
    for one in candidates:
        if one.name not in failed:
            foreign[one.name.partition("/")[0]] -= one.size


def _find_gone(
    store: Store,
    case: Audit,
    stated: Stated,
    present: Spread[None],
    breathe: Breath,
    gone: Rows,
) -> None:
    """What is offered or stated, but is not there. What is young is asked for once more, because
    it may have come while the listing was under way, or have been stored again after a removal."""

    def look(found: bytes, at: float) -> None:
        key, generation = marked(found)
        young = at > case.now - _YOUNG_S
        if not young or store.head(block_name(case.namespace, key, generation)) is None:
            # after all that is written down, even by a clock that is ahead
            gone.add(key, generation, 0, max(at, case.now))

    for found, _ in case.known.items():
        breathe()
        if found not in present.part(found):
            _, at, _ = stated.of(found) or (0, case.now, 0)
            look(found, at)
    for found, _ in stated.rows.items():
        breathe()
        if found not in present.part(found) and found not in case.known.part(found):
            kind, at, _ = stated.of(found) or (manifest.REMOVED, 0.0, 0)
            if kind == manifest.ADDED:
                look(found, at)
