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
import numpy as np
import numpy.typing as npt

from kvtier.backends.object.housekeeping.empty_namespaces import EmptyNamespaces
from kvtier.backends.object.housekeeping.keeper_limits import Spared
from kvtier.backends.object.housekeeping.lock_yield import CHUNK, LockYield
from kvtier.backends.object.housekeeping.updates import Rows
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.manifest import ADDED, ENTRY, REMOVED, Entries
from kvtier.backends.object.manifests.reconcile import Reconciliation
from kvtier.backends.object.object_names import block_name, parse_block
from kvtier.backends.object.stores.store import ObjectInfo, Store, check_namespaces, portions
from kvtier.core.slab.layout import keys_of
from kvtier.types import BlockKey

_YOUNG_S = 120.0
_HUNGER_SHARE = 16
"""A namespace without room asks for so much of the budget."""
_CANDIDATES_MAX = 1 << 16


class Unfinished(Exception):
    """There is more to list than there was time for."""


class Audit(msgspec.Struct, frozen=True):
    """What an audit starts from."""

    namespace: str
    stated: Reconciliation
    """All that is written down, and what was offered before the listing began."""
    capacity: int
    hungry: bool
    too_old_s: float
    """Blocks of this time and before, by the store's clock, must go: ours may be wrong by days."""
    read_s: float
    """How long a removed object may still be read by somebody who was told of it before."""
    dead: bool
    """Whether servers died: nobody accounts for what they removed and left there."""
    now: float
    spared: Spared = {}
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
    bare: EmptyNamespaces
    """What lies there beside blocks."""


class _Foreign(msgspec.Struct, frozen=True, order=True, gc=False):
    """An object of another namespace; the youngest is the least."""

    minus_modified_s: float
    size: int
    name: str


def audit(store: Store, case: Audit, breathe: LockYield) -> Finding:
    """List everything and compare; raises StoreError, or Unfinished."""
    seen = _Seen(case)
    breathe.begin()
    for info in store.list():
        breathe()
        if case.stop_at is not None and time.monotonic() > case.stop_at:
            raise Unfinished
        seen.take(info)
    seen.compare()
    finding = seen.finding
    _make_room(store, case, seen.foreign, seen.own_bytes, finding.foreign, breathe)
    _delete(store, seen.leftovers, breathe)
    _find_gone(store, case, *seen.missing(), breathe, finding.gone)
    return finding


class _Seen:
    """What the listing has shown until now."""

    def __init__(self, case: Audit) -> None:
        self.finding = Finding(Rows(), Rows(), {}, EmptyNamespaces())
        self.leftovers: list[str] = []
        self.foreign: list[_Foreign] = []
        self.own_bytes = 0
        self._case = case
        # a removal of a later time is by a clock that is wrong: until then the object would lie
        # there and count for nobody, so it is offered
        self._latest = case.now + manifest.SKEW_US / 1e6
        self._there = np.zeros(len(case.stated.entries), np.bool_)
        """Of which of the stated entries the objects are there."""
        self._listed = self._there.copy()
        """And of which they were listed, whether they are to stay or not."""
        self._beside = [np.zeros(0, np.uint64)]
        """Marks of those about which nothing is stated."""
        self._own: list[ObjectInfo] = []
        """Blocks that are still to be compared: many at a time cost less."""
        self._keys: list[BlockKey] = []
        self._generations: list[int] = []

    def take(self, info: ObjectInfo) -> None:
        parsed = parse_block(info.name)
        if parsed is None:
            self.finding.bare.see(info)
            return
        namespace, key, generation = parsed
        self.finding.bare.holds(namespace)
        if namespace != self._case.namespace:
            of = self.finding.foreign
            of[namespace] = of.get(namespace, 0) + info.size
            check_namespaces(of)
            if key not in self._case.spared.get(namespace, ()):
                _remember(self.foreign, info)
            return
        self.own_bytes += info.size
        self._own.append(info)
        self._keys.append(key)
        self._generations.append(generation)
        if len(self._own) == CHUNK:
            self.compare()

    def compare(self) -> None:
        """What has been seen of our own since the last time, with what is written down."""
        case, stated = self._case, self._case.stated
        objects = manifest.objects_of(self._keys, self._generations)
        rows = stated.find(objects)
        found = np.zeros(len(rows), ENTRY)  # of no kind if nothing is written down
        found[rows >= 0] = stated.entries[rows[rows >= 0]]
        there = np.ones(len(rows), np.bool_)
        columns = found["kind"].tolist(), found["time_us"].tolist(), found["size"].tolist()
        for at, (info, kind, time_us, size) in enumerate(zip(self._own, *columns, strict=True)):
            # a time to come would outlast every removal
            since = max(time_us / 1e6, min(info.modified_s, case.now))
            young = case.now - since < case.read_s
            # stored again since, which somebody may be about to write down
            again = case.dead and young and _earliest(info) > time_us / 1e6
            if kind == REMOVED and time_us / 1e6 <= self._latest and not again:
                there[at] = False
                if case.dead or not young:
                    self.leftovers.append(info.name)
            elif info.modified_s <= case.too_old_s:
                there[at] = False
                self.leftovers.append(info.name)
            elif size != info.size or kind != ADDED:
                self.finding.orphans.add(self._keys[at], self._generations[at], info.size, since)
        self._there[rows[there & (rows >= 0)]] = True
        self._listed[rows[rows >= 0]] = True
        if len(stated.beside):
            objects = objects[there & (rows < 0)]
            self._beside.append(manifest.marks(objects, objects["generation"]))
        self._own, self._keys, self._generations = [], [], []

    def missing(self) -> tuple[Entries, npt.NDArray[np.bool_]]:
        """What is offered or stated, but is not there, and which of it was not listed at all."""
        stated = self._case.stated
        wanted = (stated.known | (stated.entries["kind"] == ADDED)) & ~self._there
        beside = manifest.marks(stated.beside, stated.beside["generation"])
        unseen = np.isin(beside, np.concatenate(self._beside), invert=True)
        unlisted = np.append(~self._listed[wanted], np.ones(unseen.sum(), np.bool_))
        return np.concatenate([stated.entries[wanted], stated.beside[unseen]]), unlisted


def _earliest(info: ObjectInfo) -> float:
    """When it can have been stored at the earliest: some stores round up to whole seconds."""
    return info.modified_s - (1.0 if info.modified_s.is_integer() else 0.0)


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
    breathe: LockYield,
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
    failed = _delete(store, [one.name for one in candidates], breathe)
    for one in candidates:
        if one.name not in failed:
            foreign[one.name.partition("/")[0]] -= one.size


def _delete(store: Store, names: list[str], breathe: LockYield) -> set[str]:
    """Delete these, which may take minutes; those that could not be."""
    failed: set[str] = set()
    for some in portions(store, names):
        failed.update(store.delete(some))
        breathe()
    return failed


def _find_gone(
    store: Store,
    case: Audit,
    missing: Entries,
    unlisted: npt.NDArray[np.bool_],
    breathe: LockYield,
    gone: Rows,
) -> None:
    """What is young is asked for once more, because it may have come while the listing was under
    way, or have been stored again after a removal. Of all else that was not listed the latest of
    each part is: if that is there, the listing was not whole, and the part waits for the next."""

    def is_there(key: BlockKey, generation: int) -> bool:
        return store.head(block_name(case.namespace, key, generation)) is not None

    times = missing["time_us"] / 1e6
    young = times > case.now - _YOUNG_S
    for piece in breathe.chunks(len(missing)):
        some = missing[piece]
        columns = some["generation"].tolist(), times[piece].tolist(), young[piece].tolist()
        rows = list(zip(keys_of(some), *columns, strict=True))
        doubted = np.flatnonzero(unlisted[piece] & ~young[piece]).tolist()
        spared = set(doubted) if doubted and is_there(*rows[doubted[-1]][:2]) else ()
        for row, (key, generation, at, is_young) in enumerate(rows):
            breathe()
            if row not in spared and not (is_young and is_there(key, generation)):
                # after all that is written down, even by a clock that is ahead
                gone.add(key, generation, 0, max(at, case.now))
