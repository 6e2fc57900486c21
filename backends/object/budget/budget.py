"""How much of the store this writer may fill, counted in memory.

All writers together must never hold more than the capacity, and each knows of the others only what
it has read. So a writer takes room only against a claim that it has published and that then fits
beside all other claims and all that manifests list (see `claims`). What it may still take, its
credit, is a number here, so the scheduler's thread need not wait for the store. Credit ends by
itself if the claim is not renewed in time.

A writer that is alone needs no credit: it may use everything, and evicts before it stores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

_ALONE_SHARE = 8
_ALONE_MIN = 1 << 30
"""A writer that is alone may have an eighth of the capacity, or so much, in the store before its
manifests list it."""
_AHEAD_SHARE = 4
"""All writers together claim at most a fourth of what they may hold ahead of need."""
_READY_SHARE = 64
"""And at least this part, even if they have stored little lately: the blocks of a prompt come all
at once, and those that find no room are not stored."""

UNLIMITED = 1 << 60
"""The capacity of a command that fills a store: it has none of its own."""
_AHEAD_OF_UNLIMITED = 64 << 20
"""Such a command claims so much beyond what it has: about what it stores until its next claim."""


def clock() -> float:
    """A clock in seconds that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Grant(msgspec.Struct, frozen=True):
    """What a writer may use, by the claims that it read."""

    alone: bool = False
    """No other writer uses this namespace."""
    claim: int = 0
    """Bytes that we may have in the store beyond what manifests list."""
    others: int = 0
    """The same for all other writers of the namespace."""
    dead: int = 0
    """The same for dead writers: these bytes may be there, and no audit has found them yet."""
    blocked: bool = False
    """Another writer still believes that it is alone."""
    writers: int = 1
    cap: int = 0
    """Bytes that the namespace may hold."""
    measured: bool = False
    """Whether `cap` is known: without a listing nobody knows what is there."""
    lease_until: float = 0.0
    serial: int = 0
    settled: int = 0
    """`Budget.settled` when the claim was found to fit."""


class Budget:
    """The account of one writer. Safe for the scheduler's thread and the keeper's."""

    def __init__(self, capacity: int, block_bytes: int, clock: Callable[[], float] = clock) -> None:
        self.capacity = capacity
        """The largest of all that share the store: see `claims`."""
        self.used = 0
        """Bytes of all blocks of the namespace that are known or reserved."""
        self.deleting = 0
        """Bytes of dropped objects that are still there."""
        self.uncatalogued = 0
        """Bytes of objects that are there but not in the catalogue, until an audit finds them."""
        self._block_bytes = block_bytes
        self._shared = capacity
        """What all writers of the namespace may hold, by the last claim."""
        self._clock = clock
        self._lock = threading.RLock()
        self._grant = Grant()
        self.serial = 0
        """How often what may be used was lowered: grants from before that do not hold any more."""
        self.settled = 0
        """Bytes that were reserved and have been settled, since the beginning."""
        self._pending = 0
        """Bytes reserved that no manifest lists yet."""
        self._credit = 0
        self._held = 0
        """The part of the credit that is being reserved at this moment."""
        self._claimed = 0
        self._demand = 0
        """Bytes that were stored or refused lately."""

    # -- the scheduler's side --------------------------------------------------------------------

    @property
    def cap(self) -> int:
        return self._grant.cap

    def published_cap(self, cap: int) -> int:
        """The cap to publish. A writer without a limit would leave other namespaces no room: it
        publishes what it has, and a little more."""
        return cap if self.capacity < UNLIMITED else min(cap, self.used + _AHEAD_OF_UNLIMITED)

    @property
    def alone(self) -> bool:
        """Whether evicting makes room at once; if not, room comes with the next claim."""
        return self._grant.alone

    def hold(self, blocks: int) -> tuple[int, float]:
        """Set room aside for blocks to be reserved next. Returns for how many, and until when they
        may be written. `give_back` returns what is not reserved."""
        with self._lock:
            self.give_back()
            now = self._grant
            if self._clock() >= now.lease_until:
                return 0, 0.0
            free = now.cap - self.used - self.deleting - self.uncatalogued - now.dead
            free = min(free, now.claim - self._pending if now.alone else self._credit)
            granted = min(blocks, max(0, free // self._block_bytes))
            self._held = granted * self._block_bytes
            self._credit -= self._held
            return granted, now.lease_until

    def evictable(self, blocks: int) -> int:
        """For how many of these blocks evicting others makes room. It is 0 without a valid claim,
        or if there is too much already: everything would be evicted in vain."""
        with self._lock:
            now = self._grant
            there = self.used + self.deleting + self.uncatalogued + now.dead
            if not now.alone or self._clock() >= now.lease_until or there > now.cap:
                return 0
            return min(blocks, max(0, now.claim - self._pending) // self._block_bytes)

    def give_back(self) -> None:
        """Return the room that was set aside and not reserved."""
        with self._lock:
            self._credit += self._held
            self._held = 0

    def reserve(self, size: int) -> None:
        """Use room that was set aside for a block that is about to be written."""
        with self._lock:
            self.used += size
            self._pending += size
            self._held -= size
            if not self._grant.alone:
                self._demand += size

    def unsettle(self, size: int) -> None:
        """So many bytes are not in manifests any more, but still in the store."""
        with self._lock:
            self._pending += size
            self._credit -= size

    def note_refused(self, size: int) -> None:
        """There was no room for so many bytes."""
        with self._lock:
            self._demand += size

    def apply(self, grant: Grant) -> None:
        """Take over a grant. All that manifests listed then must be counted in `used`."""
        with self._lock:
            if grant.serial != self.serial:
                return  # our claim has been lowered since
            self._grant = grant
            taken = self.used + self.deleting + self.uncatalogued + grant.dead + grant.others
            # what manifests list since then must not be counted once more: the claims of others may
            # have been found to fit beside it
            unused = grant.claim - (self.settled - grant.settled) - self._pending
            fits = min(unused, grant.cap - taken)
            self._credit = 0 if grant.blocked or grant.alone else max(0, fits)
            self._demand = 0 if grant.alone else self._demand // 2

    def surplus(self) -> int:
        """Bytes to drop to keep the budget, and to make a claim fit that is needed."""
        now = self._grant
        if now.lease_until == 0.0 or now.blocked or not now.measured:
            return 0
        needed = 0 if now.alone else now.claim - self._pending + now.others
        if not self._demand:
            needed = min(needed, now.writers * self._ready(now.writers))
        return self.used + self.uncatalogued + needed - now.cap

    # -- the keeper's side -----------------------------------------------------------------------

    @property
    def mostly_unrecorded(self) -> bool:
        """Whether half of what is claimed is in the store and not in manifests yet."""
        return 2 * self._pending > self._claimed

    def settle(self, size: int) -> None:
        """So many reserved bytes are in manifests now, or were never written."""
        with self._lock:
            self._pending -= size
            self.settled += size

    def size_claim(self, *, alone: bool, writers: int, cap: int) -> int:
        """The bytes to claim: what is on its way, and what will be needed soon. `cap` is the lowest
        cap that a writer of the namespace publishes: a claim by a higher one would leave that
        writer no room. No more than the claim is used from now on."""
        with self._lock:
            self._shared = cap = self.published_cap(cap)
            if alone:
                claim = max(self.capacity // _ALONE_SHARE, _ALONE_MIN)
            else:
                if self._grant.alone:
                    self.revoke()
                most = max(self._block_bytes, cap // (_AHEAD_SHARE * writers))
                least = max(self._block_bytes, self._ready(writers))
                ahead = min(most, max(least, 4 * self._demand))
                claim = self._pending + self._held + ahead
                if claim < self._claimed:
                    self.serial += 1
                    self._credit = min(self._credit, ahead)
            self._claimed = claim
            return claim

    def _ready(self, writers: int) -> int:
        """Room that each writer has at any time, in whole blocks."""
        blocks = self._shared // (_READY_SHARE * writers * self._block_bytes)
        return blocks * self._block_bytes

    def revoke(self) -> None:
        """Nothing may be reserved until the next grant."""
        with self._lock:
            self.serial += 1
            self._credit = 0
            self._grant = Grant(cap=self._grant.cap)

    def lower_cap(self, cap: int) -> int:
        """Leave more to other namespaces, but not what is already filled; returns what is kept."""
        with self._lock:
            now = self._grant
            bound = (
                self.used + self.deleting + self.uncatalogued + max(0, self._credit) + self._held
            )
            bound += now.dead + now.others
            kept = max(cap, bound)
            self.serial += 1
            self._grant = msgspec.structs.replace(now, cap=min(now.cap, kept))
            return kept
