"""What is written down about a store against what is there: the listing that rebuilds.

Finds blocks that no manifest knows (their writer died), entries without an object (somebody
deleted it), objects whose deletion was lost, and what other namespaces take of the budget. Deletes
only objects that have the names of kvtier's blocks, and only what is removed, too old, or, in other
namespaces, the oldest when the budget is exceeded.
"""

from __future__ import annotations

import heapq
import time

import msgspec

from kvtier.backends.object import manifest
from kvtier.backends.object.breath import Breath
from kvtier.backends.object.leaving import Object
from kvtier.backends.object.manifest import Entries
from kvtier.backends.object.names import block_name, parse_block
from kvtier.backends.object.spread import Spread
from kvtier.backends.object.store import ObjectInfo, Store
from kvtier.types import BlockKey

_YOUNG_S = 120.0
_HUNGER_SHARE = 16
"""A namespace without room asks for so much of the budget."""
_CANDIDATES_MAX = 1 << 16


Stated = Spread[tuple[int, float, int]]
"""Kind, time and size of each object."""


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

    orphans: list[tuple[BlockKey, int, int, float]]
    """Blocks that nobody wrote down, or of another size than stated."""
    gone: list[tuple[BlockKey, int]]
    """Known blocks without an object, or too old."""
    foreign: dict[str, int]
    """Bytes of other namespaces."""


def audit(store: Store, case: Audit, breathe: Breath) -> Finding:
    """List everything and compare; raises StoreError, or Unfinished."""
    stated = _by_name(case.entries, breathe)
    finding = Finding([], [], {})
    present: Spread[None] = Spread()
    leftovers: list[str] = []
    foreign: list[tuple[float, int, str]] = []
    own_bytes = 0
    breathe.begin()
    for info in store.list():
        breathe()
        if case.stop_at is not None and time.monotonic() > case.stop_at:
            raise Unfinished
        parsed = parse_block(info.name)
        if parsed is None:
            continue
        namespace, key, generation = parsed
        if namespace != case.namespace:
            finding.foreign[namespace] = finding.foreign.get(namespace, 0) + info.size
            _remember(foreign, info)
            continue
        own_bytes += info.size
        kind, at, size = stated.part(key).get((key, generation), (manifest.ADDED, 0.0, -1))
        if kind == manifest.REMOVED:
            if case.now - max(at, info.modified_s) >= case.read_s:
                leftovers.append(info.name)
        elif case.age_max_s is not None and case.now - info.modified_s > case.age_max_s:
            leftovers.append(info.name)
        else:
            present.part(key)[key, generation] = None
            if size != info.size:
                finding.orphans.append((key, generation, info.size, max(at, info.modified_s)))
    _make_room(store, case, foreign, own_bytes, finding.foreign)
    store.delete(leftovers)
    finding.gone = _gone(store, case, stated, present, breathe)
    return finding


def _by_name(entries: Entries, breathe: Breath) -> Stated:
    """Kind, time and size by key and generation."""
    found: Stated = Spread()
    for piece in breathe.chunks(len(entries)):
        rows = entries[piece]
        columns = zip(
            manifest.keys_of(rows),
            rows["generation"].tolist(),
            rows["kind"].tolist(),
            (rows["time_us"] / 1e6).tolist(),
            rows["size"].tolist(),
            strict=True,
        )
        for key, generation, kind, at, size in columns:
            found.part(key)[key, generation] = kind, at, size
    return found


def _remember(oldest: list[tuple[float, int, str]], info: ObjectInfo) -> None:
    """Keep the oldest objects of other namespaces, a bounded number of them."""
    entry = (-info.modified_s, info.size, info.name)
    if len(oldest) < _CANDIDATES_MAX:
        heapq.heappush(oldest, entry)
    else:
        heapq.heappushpop(oldest, entry)


def _make_room(
    store: Store,
    case: Audit,
    candidates: list[tuple[float, int, str]],
    own_bytes: int,
    foreign: dict[str, int],
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
    chosen: list[tuple[str, int]] = []
    for _, size, name in sorted(candidates, reverse=True):
        if share <= 0:
            break
        chosen.append((name, size))
        share -= size
    failed = store.delete([name for name, _ in chosen])
    for name, size in chosen:
        if name not in failed:
            foreign[name.partition("/")[0]] -= size


def _gone(
    store: Store,
    case: Audit,
    stated: Stated,
    present: Spread[None],
    breathe: Breath,
) -> list[Object]:
    """What is offered or stated, but is not there. What is young is asked for once more, because
    it may have come while the listing was under way, or have been stored again after a removal."""
    gone: list[Object] = []

    def look(suspect: Object) -> None:
        breathe()
        key, generation = suspect
        if suspect in present.part(key):
            return
        _, at, _ = stated.part(key).get(suspect, (manifest.ADDED, case.now, 0))
        young = at > case.now - _YOUNG_S
        if not young or store.head(block_name(case.namespace, key, generation)) is None:
            gone.append(suspect)

    for suspect, _ in case.known.items():
        look(suspect)
    for suspect, (kind, _, _) in stated.items():
        if kind == manifest.ADDED and suspect not in case.known.part(suspect[0]):
            look(suspect)
    return gone
