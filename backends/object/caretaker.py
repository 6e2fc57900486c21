"""The caretaker: one server that keeps the budget of a bucket for all.

In each round it reads what all servers have recorded, deletes what was removed, evicts what is
worth least if there is too little room, and reports how much is there. The report gives each server
a share of what is free: so many bytes beyond those that the caretaker has seen in its manifests. A
server uses its earlier share until it has read the report, so that one counts, too, until it has
run out and its server has recorded all that it stored. So all servers together never store more
than was free, whatever they do at the same time, but for what servers that die had stored and not
recorded; an audit finds that. `burst_bytes` bounds it.

A removal is recorded before the object is deleted, and before each batch of deletes the caretaker
makes sure that it still is the caretaker. If it dies in between, or is stopped, its successor
deletes what is recorded as removed. A server that stores a block again whose removal is recorded
gives its object another name, so no delete that is late hits it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice

import msgspec
import numpy as np

from kvtier.backends.object import namespaces
from kvtier.backends.object.audit import Audit
from kvtier.backends.object.block_index import BlockIndex
from kvtier.backends.object.budget import UNLIMITED
from kvtier.backends.object.gil_yield import GilYield
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.lease import LEASE_S, PATIENCE, CaretakerReport, Lease, Servers
from kvtier.backends.object.manifests import (
    ADDED,
    REMOVED,
    Entries,
    joined,
    key_prints,
    objects_in,
    pack_entries,
    removals,
)
from kvtier.backends.object.namespaces import Descriptions
from kvtier.backends.object.object_names import ObjectKey, ServerName, block_name, caretaker_writer
from kvtier.backends.object.stores.errors import Misconfigured, StoreError, StoreFull
from kvtier.backends.object.stores.store import CRASHED_S, Store
from kvtier.backends.object.use_counts import new_uses, retained_blocks
from kvtier.settings import ByteSize
from kvtier.types import BlockKey

_log = logging.getLogger(__name__)

_BURST_SHARE = 50
_BURST_MIN = 1 << 30
_FREE_SHARE = 64
"""This part of the capacity is kept free where several servers or namespaces share it: the blocks
of a prompt come all at once."""
_FREE_BLOCKS = 4
_FREE_SHARE_MAX = 4
"""And so many blocks for each server that found no room lately, but at most a fourth of it."""
_EVICTED_MIN_SHARE = 256
"""So much is evicted at once, because choosing takes a while."""
_EVICTED_AT_ONCE = 1 << 16
"""Blocks in one manifest, which must be written before the store's deadline."""
_USED_SHARE = 4
"""A block that was used after it was stored counts as younger by a fourth of the age of the
oldest."""
_RETAINED_WORTH = 1e12
"""More than any time in seconds of the epoch."""
_USES_EVERY_S = 30.0
_DELETES_SHARE = 4
"""Deletes of one round take a fourth of the lease at most; the rest waits for the next."""
_REMEMBERED_S = 60.0
_REMEMBERED_LOOKS = 4
"""Servers record, the caretaker relays, others read: each once a look."""
_SHARE_S = 2.0
_SHARE_LOOKS = 3
"""A share holds for so many looks, and at least for so long, after a server has read of it."""

ProtectedBlocks = Mapping[str, Set[BlockKey]]
"""By namespace, blocks that are not evicted."""


class Limits(msgspec.Struct, frozen=True):
    """What the keeper and the caretaker must know of the settings. Sizes in bytes, times in
    seconds."""

    capacity: int
    refresh_s: float
    audit_s: float
    age_max_s: float | None = None
    lease_s: float = LEASE_S
    protected: ProtectedBlocks = {}

    @property
    def remembered_s(self) -> float:
        """For so long at least manifests tell of a removal. Who has not read them for half of that
        reads them all anew."""
        return max(_REMEMBERED_S, _REMEMBERED_LOOKS * self.refresh_s)

    @property
    def share_s(self) -> float:
        """For so long a server may use its share after it has read the report."""
        return max(_SHARE_S, _SHARE_LOOKS * self.refresh_s)


class Grant(msgspec.Struct):
    """The share of one report."""

    share: int
    recorded: dict[str, int]
    """By writer that has it, how many bytes it had recorded."""
    until: float = math.inf
    """When no server uses it any more, by our clock: known as soon as the next report is there."""


class Caretaker:
    """The work of one term. One thread at a time; `spared` may be called at any time, and names
    blocks of our own namespace that are being read."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        own: ServerName,
        limits: Limits,
        *,
        clock: Callable[[], float],
        gil_yield: GilYield,
        spared: Callable[[], Sequence[BlockKey]] = lambda: (),
    ) -> None:
        self._store = store
        self._lease = lease
        self._own = own
        self._limits = limits
        self._clock = clock
        self._yield = gil_yield
        self._spared = spared
        self._steady = lease.clock
        self._servers = Servers(store, limits.lease_s, lease.clock)
        self._living: dict[str, ServerName] = {}
        self._journals: dict[str, Journal] = {}
        self._indexes: dict[str, BlockIndex] = {}
        self._doomed: deque[tuple[str, ObjectKey]] = deque()
        """Objects that are recorded as removed and still to be deleted."""
        self._doomed_bytes = 0
        self._unrecorded: deque[tuple[str, Entries]] = deque()
        """What a full store has not taken."""
        self._kept = self._kept_bytes = 0
        """Removed objects that the store would not delete, until the next audit tries again."""
        self._lost_bytes = 0
        """What servers may have stored and not recorded that have died since the last audit."""
        self.news: deque[Entries] = deque()
        """What was recorded of our own namespace, for our own server."""
        self._uses_at = -1e18
        self._uses_read: dict[str, set[str]] = {}
        """By namespace, the lists that are in its index."""
        self._warned = False
        self.report = lease.last_report
        self._seen = dict(self.report.seen)
        self._recorded = dict.fromkeys(self._seen, 0)
        """By writer, the bytes in those of its manifests that are new in this term."""
        self._grants = deque([Grant(self.report.share, dict(self._recorded))])
        self._own_unseen = 0
        self._own_has_all = False
        self.needs_audit = not self.report.measured
        """Whether there may be blocks that nobody has recorded."""
        for namespace in namespaces.listed(store):
            self._read(namespace)

    # -- rounds ----------------------------------------------------------------------------------

    def round(self, own_unseen: int = 0) -> CaretakerReport:
        """`own_unseen`: what our own server has stored, or is storing, beyond what was seen of its
        manifests. Raises StoreError."""
        self._own_unseen = own_unseen
        self._living, dead = self._servers.look(self._own)
        if dead:
            self._lost_bytes += sum(self._granted(name.writer) for name in dead)
            self.needs_audit = True
        for namespace in {name.namespace for name in self._living.values()}:
            self._read(namespace)
        full = not self._relay()
        self._make_room()
        self._delete_doomed()
        self.report = self._make_report()
        full |= not self._publish()
        if full:  # nobody else makes room there
            self._evict(self._capacity() // _FREE_SHARE)
            self._delete_doomed()
            self._publish()
        with suppress(StoreFull):
            self._record_late()
        for namespace, journal in self._journals.items():
            if journal.worth_joining():
                self._lease.confirm()
                journal.join(self._indexes[namespace].entries)
        self._own_has_all = self.alone
        return self.report

    @property
    def alone(self) -> bool:
        """Whether there is no other server, and no block of another namespace."""
        foreign = sum(
            index.bytes for name, index in self._indexes.items() if name != self._own.namespace
        )
        return self._living.keys() <= {self._own.writer} and not foreign

    @property
    def own_limit(self) -> int:
        """What our own namespace may hold if we are alone."""
        return self.report.capacity - self._unlisted_bytes

    @property
    def _unlisted_bytes(self) -> int:
        """What is there, or may be, and is not recorded as added."""
        return self._doomed_bytes + self._kept_bytes + self._lost_bytes

    def _read(self, namespace: str) -> None:
        """Take in what is new in the manifests of a namespace."""
        journal = self._journals.get(namespace)
        if journal is None:
            is_own = namespace == self._own.namespace
            writer = caretaker_writer(self._lease.term)
            journal = Journal(self._store, namespace, writer, seen=self._seen, quiet=is_own)
            index = BlockIndex(journal.read_all(relayed=True))
            self._journals[namespace], self._indexes[namespace] = journal, index
            self._doom(namespace, index.entries[index.entries["kind"] == REMOVED])
        entries = journal.read_to_relay()
        self._doomed_bytes += self._indexes[namespace].apply(entries)
        self._tell(namespace, entries)
        for writer, number in journal.numbers.items():
            self._seen[writer] = max(number, self._seen.get(writer, -1))
        for writer, size in journal.take_recorded().items():
            self._recorded[writer] = self._recorded.get(writer, 0) + size
        self._doom(namespace, entries[entries["kind"] == REMOVED])

    def _relay(self) -> bool:
        """Tell all servers what each of them has recorded; False if the store is full."""
        self._lease.check()
        try:
            for journal in self._journals.values():
                journal.relay()
        except StoreFull:
            return False
        return True

    def _publish(self) -> bool:
        """Report, and renew the lease; False if the store is full."""
        granted = {writer: self._recorded.get(writer, 0) for writer in self.report.seen}
        grant = Grant(self.report.share, granted)
        if (grant.share, granted) != (self._grants[-1].share, self._grants[-1].recorded):
            self._grants.append(grant)  # before: a request that failed may have come through
        try:
            self._lease.publish(self.report)
        except StoreFull:
            return False
        until = self._steady() + PATIENCE * self.report.share_s
        for earlier in islice(self._grants, len(self._grants) - 1):
            earlier.until = min(earlier.until, until)
        while len(self._grants) > 1 and not any(
            self._counts(self._grants[0], writer) for writer in self._living
        ):
            self._grants.popleft()
        return True

    def _granted(self, writer: str) -> int:
        """What a server may have stored, or may store still, beyond what we have seen."""
        now = self._recorded.get(writer, 0)
        counting = [grant for grant in self._grants if self._counts(grant, writer)]
        granted = (grant.share - (now - grant.recorded[writer]) for grant in counting)
        unseen = self._own_unseen if writer == self._own.writer else 0
        return max(unseen, *granted, 0)

    def _counts(self, grant: Grant, writer: str) -> bool:
        """Whether a server may have used this share for what it has not recorded yet: it records
        all before it says that it lives. Our own server knows each report at once."""
        if writer not in grant.recorded:
            return False
        if writer == self._own.writer:
            return grant is self._grants[-1]
        return grant.until > self._servers.alive_at.get(writer, -math.inf)

    def _tell(self, namespace: str, entries: Entries) -> None:
        if namespace == self._own.namespace:
            self.news.append(entries)

    def _doom(self, namespace: str, removed: Entries) -> None:
        self._doomed.extend((namespace, key) for key in objects_in(removed))

    def _make_report(self) -> CaretakerReport:
        capacity = self._capacity()
        recorded = sum(index.bytes for index in self._indexes.values())
        there = recorded + self._unlisted_bytes
        granted = [self._granted(writer) for writer in self._living]
        share = fair_share(max(0, capacity - there), granted)
        share = min(share, burst_bytes(capacity) // max(1, len(granted)))
        if self._own_has_all and not self.alone:
            share = 0  # until our own server knows that it has a share only
        measured = self.report.measured
        return CaretakerReport(
            measured=measured,
            capacity=capacity,
            bytes=there,
            share=share if measured else 0,
            share_s=self._limits.share_s,
            seen={writer: self._seen.get(writer, -1) for writer in self._living},
        )

    def _capacity(self) -> int:
        """The largest of all that servers have in their settings: a server with less must not empty
        the bucket of the others."""
        known = [self._limits.capacity, *(name.capacity for name in self._living.values())]
        largest = max((size for size in known if size < UNLIMITED), default=UNLIMITED)
        if self._limits.capacity < largest and not self._warned:
            self._warned = True
            _log.warning(
                "servers that share this store have different capacities: %s counts, and the %s of "
                "this one does not; write the same in all stacks",
                ByteSize(largest),
                ByteSize(self._limits.capacity),
            )
        return largest

    # -- deleting --------------------------------------------------------------------------------

    def _delete_doomed(self) -> None:
        """Delete what is recorded as removed, as much as a round has time for."""
        until = self._steady() + self._limits.lease_s / _DELETES_SHARE
        while self._doomed and self._steady() < until:
            batch = list(islice(self._doomed, self._store.deletes_at_once))
            deadline = time.monotonic() + self._lease.confirm()
            names = [block_name(namespace, *key) for namespace, key in batch]
            try:
                failed = self._store.delete(names, deadline=deadline)
            except Misconfigured as error:  # which only a change of settings ends
                failed = dict.fromkeys(names, error)
            self._doomed_bytes -= self._doomed_bytes * len(batch) // len(self._doomed)
            for _ in batch:
                self._doomed.popleft()
            self._yield()
            if failed:
                self._note_kept(batch, failed)

        if not self._doomed:
            self._doomed_bytes = 0  # also of blocks that an audit found to be gone already

    def _note_kept(
        self, batch: Sequence[tuple[str, ObjectKey]], failed: Mapping[str, StoreError]
    ) -> None:
        """A locked object, say, must not hold up all others: the next audit tries again."""
        if not self._kept:
            _log.warning("objects cannot be deleted: %s", next(iter(failed.values())))
        self._kept += len(failed)
        self._kept_bytes += sum(
            self._block_bytes(namespace)
            for namespace, key in batch
            if block_name(namespace, *key) in failed
        )

    def _block_bytes(self, namespace: str) -> int:
        """About: the sizes of removed objects are not known any more."""
        index = self._indexes[namespace]
        return index.bytes // max(1, int((index.entries["kind"] == ADDED).sum()))

    # -- evicting --------------------------------------------------------------------------------

    def _make_room(self) -> None:
        capacity = self._capacity()
        wanted = 0 if self.alone else self._wanted_free(capacity)
        recorded = sum(index.bytes for index in self._indexes.values())
        surplus = recorded + self._kept_bytes + wanted - capacity
        if surplus > 0 and self.report.measured:
            self._evict(surplus if self.alone else max(surplus, capacity // _EVICTED_MIN_SHARE))

    def _wanted_free(self, capacity: int) -> int:
        """Whole blocks of the largest kind; if servers found no room lately, some for each of
        them, beside what others may use up of larger shares."""
        sizes = {writer: name.block_bytes for writer, name in self._living.items()}
        largest = max(sizes.values(), default=1)
        usual = capacity // _FREE_SHARE // largest * largest
        lacking = sum(sizes.get(writer, 0) for writer in self._servers.lacking_room)
        if not lacking:
            return usual
        most = max(usual, capacity // _FREE_SHARE_MAX)
        wanted = min(max(usual, _FREE_BLOCKS * lacking), most)
        share = wanted // max(1, len(self._living))
        granted = sum(max(0, self._granted(writer) - share) for writer in self._living)
        return wanted + min(granted, most)

    def _evict(self, surplus: int) -> None:
        """Record that the blocks that are worth least are gone, and delete them in the rounds that
        follow."""
        self._lease.confirm()
        self._read_uses()
        names = [name for name, index in self._indexes.items() if index.bytes]
        if not names:
            return
        pieces = [self._indexes[name].blocks() for name in names]
        worths = [self._worth(name, some) for name, some in zip(names, pieces, strict=True)]
        worth = np.concatenate(worths)
        sizes = np.concatenate([some["size"] for some in pieces])
        order = np.argsort(worth, kind="stable")
        summed = np.cumsum(sizes[order])
        count = min(int(np.searchsorted(summed, surplus)) + 1, len(order), _EVICTED_AT_ONCE)
        chosen = order[:count]
        chosen = chosen[worth[chosen] < np.inf]
        start = 0
        for name, some in zip(names, pieces, strict=True):
            mine = chosen[(chosen >= start) & (chosen < start + len(some))] - start
            start += len(some)
            if len(mine):
                self._remove(name, some[mine])

    def _worth(self, namespace: str, some: Entries) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """What each block is worth: when it was used last, and more if it was used at all. What is
        retained is worth more than that, and what is being read is not evicted."""
        stored = some["time_us"] / 1e6
        used = some["used_s"].astype(np.float64)
        worth = np.maximum(stored, used)
        span = float(worth.max() - worth.min()) if len(worth) else 0.0
        worth[used > stored] += span / _USED_SHARE
        prints = key_prints(some)
        now_us = int(self._clock() * 1e6)
        living = {name.writer for name in self._living.values() if name.namespace == namespace}
        retained = retained_blocks(self._store, namespace, living)
        held = joined(entries[entries["time_us"] > now_us] for entries in retained)
        worth[np.isin(prints, key_prints(held))] += _RETAINED_WORTH
        spared = set(self._limits.protected.get(namespace, ()))
        if namespace == self._own.namespace:
            spared.update(self._spared())
        if spared:
            worth[np.isin(prints, key_prints(pack_entries(0, list(spared), 0, 0, 0)))] = np.inf
        return worth

    def _remove(self, namespace: str, some: Entries) -> None:
        at_us = max(int(self._clock() * 1e6), int(some["time_us"].max()) + 1)
        entries = removals(objects_in(some), at_us)
        self._record(namespace, entries)
        self._doom(namespace, entries)

    def _record(self, namespace: str, entries: Entries) -> None:
        """In a store that is full the record waits: deleting comes first, or it would stay full."""
        try:
            self._journals[namespace].append(entries)
        except StoreFull:
            self._unrecorded.append((namespace, entries))
        self._doomed_bytes += self._indexes[namespace].apply(entries)
        self._tell(namespace, entries)

    def _record_late(self) -> None:
        while self._unrecorded:
            namespace, entries = self._unrecorded[0]
            self._journals[namespace].append(entries)
            self._unrecorded.popleft()

    def _read_uses(self) -> None:
        if self._steady() - self._uses_at < _USES_EVERY_S:
            return
        self._uses_at = self._steady()
        for namespace, index in self._indexes.items():
            read = self._uses_read.setdefault(namespace, set())
            index.note_uses(new_uses(self._store, namespace, read))

    # -- audits ----------------------------------------------------------------------------------

    def audit(self, stop_at: float | None = None) -> None:
        """List everything, correct what is recorded, delete what is left over. Raises StoreError,
        or Unfinished."""
        self._lease.check()
        begun_s, lost = self._clock(), self._lost_bytes
        found = Audit(
            self._store,
            self._index_of,
            now_s=begun_s,
            too_old_s=self._too_old_s(),
            gil_yield=self._yield,
        )
        found.run(list(self._indexes), stop_at=stop_at)
        if any(each.corrections or each.leftovers for each in found.findings.values()):
            self._lease.confirm()
        self._kept = self._kept_bytes = 0
        for namespace, findings in found.findings.items():
            wrong = joined(findings.corrections)
            for start in range(0, len(wrong), _EVICTED_AT_ONCE):
                self._record(namespace, wrong[start : start + _EVICTED_AT_ONCE])
            self._doomed.extend((namespace, key) for key in findings.leftovers)
        self._lost_bytes -= lost
        self.report = msgspec.structs.replace(self.report, measured=True)
        self.needs_audit = self._lost_bytes > 0
        self._delete_doomed()
        for namespace, journal in self._journals.items():
            if not self._doomed and not self._kept and journal.complete:
                self._indexes[namespace].forget_removed(
                    int((begun_s - self._limits.remembered_s) * 1e6)
                )
            journal.drop_damaged()
        self._sweep(found.descriptions)
        for _ in self._store.sweep(CRASHED_S):
            self._yield()

    def _sweep(self, descriptions: Descriptions) -> None:
        """Remove what is left of namespaces without a block, and of the first alpha."""
        now_s = self._lease.store_time()
        for namespace in descriptions.without_blocks():
            if namespace == self._own.namespace:
                continue
            self._lease.confirm()
            if namespaces.remove(self._store, namespace, now_s):
                self._indexes.pop(namespace, None)
                self._journals.pop(namespace, None)
            self._yield()
        namespaces.remove_old_claims(self._store, descriptions.old_claims, now_s)

    def _too_old_s(self) -> float:
        """By the store's clock."""
        age_s = self._limits.age_max_s
        return -np.inf if age_s is None else self._lease.store_time() - age_s

    def _index_of(self, namespace: str) -> BlockIndex:
        if namespace not in self._indexes:
            self._read(namespace)
        return self._indexes[namespace]


def fair_share(free: int, granted: Sequence[int]) -> int:
    """The most that each server may have if some may still use up what they were granted before."""
    left = sorted(granted)
    while left and left[-1] * len(left) > free:
        free -= left.pop()
    return max(0, free // len(left)) if left else 0


def burst_bytes(capacity: int) -> int:
    """What all servers together may have stored at any time that no manifest lists."""
    return max(capacity // _BURST_SHARE, min(_BURST_MIN, capacity))
