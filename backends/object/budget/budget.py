"""How much of the prefix this server may fill, counted in memory.

All writers together must never hold more than the capacity, though each knows of the others only
what it has read. So a writer takes room only against a claim that it has published, and that it has
then found to fit beside all other claims and all that is written down (see `claims`). What it may
still take, its credit, is a number here: whoever asks for room on a scheduler's thread needs
nothing else, and credit ends by itself when the claim is not renewed in time.

A writer that is alone has no credit to count: it may use everything, and evicts before it stores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

_ALONE_SHARE = 8
_ALONE_MIN = 1 << 30
"""What a writer that is alone may have on its way before it has written down what is there: an
eighth of the capacity, or so much."""
_AHEAD_SHARE = 4
"""All writers together claim at most this part of what they may hold (a fourth) ahead of need."""
_READY_SHARE = 64
"""And at least this part, however little they have stored lately: a prompt comes all at once, and
what there is no room for is lost to the store."""

UNLIMITED = 1 << 60
"""The capacity of who fills a store by hand: none, beside others that have one."""
_AHEAD_OF_UNLIMITED = 64 << 20
"""What such a writer tells others that it may hold beyond what it has: about as much as it stores
before it tells them again."""


def clock() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Standing(msgspec.Struct, frozen=True):
    """What a writer may do, as agreed by the claims that it read."""

    alone: bool = False
    """Nobody else writes in this namespace."""
    claim: int = 0
    """Bytes that we may have on the way, beyond what is written down."""
    others: int = 0
    """The same of all other writers of the namespace."""
    dead: int = 0
    """The same of writers that died: it may be there, and nobody has listed it yet."""
    blocked: bool = False
    """Somebody else still believes to be alone."""
    writers: int = 1
    cap: int = 0
    """Bytes that the namespace may hold."""
    measured: bool = False
    """Whether that is a bound for what is there, and not just unknown as yet."""
    lease_until: float = 0.0
    serial: int = 0
    settled: int = 0
    """How much had been settled when the claim was found to fit."""


class Budget:
    """The account of one writer. Safe from the scheduler's thread and the keeper's."""

    def __init__(self, capacity: int, block_bytes: int, clock: Callable[[], float] = clock) -> None:
        self.capacity = capacity
        """The largest of all who share the store: see `claims`."""
        self.used = 0
        """Bytes of all blocks of the namespace that are known or reserved."""
        self.dying = 0
        """Bytes of dropped objects that are still there."""
        self.hidden = 0
        """Bytes that are there but not offered, until an audit finds them again."""
        self._block_bytes = block_bytes
        self._shared = capacity
        """What all writers of the namespace may hold, by the last offer."""
        self._clock = clock
        self._lock = threading.RLock()
        self._standing = Standing()
        self.serial = 0
        """How often what may be used was lowered: what was agreed before that no longer holds."""
        self.settled = 0
        """Of what was reserved, how much has been settled since the beginning."""
        self._pending = 0
        """Bytes reserved that no manifest tells of yet."""
        self._credit = 0
        self._held = 0
        """Of the credit, what is being reserved at this moment."""
        self._promised = 0
        self._demand = 0

    # -- the scheduler's side --------------------------------------------------------------------

    @property
    def cap(self) -> int:
        return self._standing.cap

    def told(self, cap: int) -> int:
        """What to tell other namespaces of this cap. A writer without a limit would leave them no
        room: it tells what it has, and a little more."""
        return cap if self.capacity < UNLIMITED else min(cap, self.used + _AHEAD_OF_UNLIMITED)

    @property
    def alone(self) -> bool:
        """Whether what is evicted makes room at once; if not, room comes with the next claim."""
        return self._standing.alone

    def hold(self, blocks: int) -> tuple[int, float]:
        """Room for blocks that may be reserved next: for how many of so many, and until when they
        may be written. The rest must be given back."""
        with self._lock:
            self.give_back()
            now = self._standing
            if self._clock() >= now.lease_until:
                return 0, 0.0
            free = now.cap - self.used - self.dying - self.hidden - now.dead
            free = min(free, now.claim - self._pending if now.alone else self._credit)
            granted = min(blocks, max(0, free // self._block_bytes))
            self._held = granted * self._block_bytes
            self._credit -= self._held
            return granted, now.lease_until

    def within_reach(self, blocks: int) -> int:
        """For how many of so many blocks evicting others makes room. For none without a claim that
        is still good, or where there is too much already: everything would go for nothing."""
        with self._lock:
            now = self._standing
            there = self.used + self.dying + self.hidden + now.dead
            if not now.alone or self._clock() >= now.lease_until or there > now.cap:
                return 0
            return min(blocks, max(0, now.claim - self._pending) // self._block_bytes)

    def give_back(self) -> None:
        """What was held and not used may be held again."""
        with self._lock:
            self._credit += self._held
            self._held = 0

    def reserve(self, size: int) -> None:
        """Use what is held for a block that is about to be written."""
        with self._lock:
            self.used += size
            self._pending += size
            self._held -= size
            if not self._standing.alone:
                self._demand += size

    def owe(self, size: int) -> None:
        """So much is no longer written down, but still there."""
        with self._lock:
            self._pending += size
            self._credit -= size

    def refused(self, size: int) -> None:
        """There was no room for so much."""
        with self._lock:
            self._demand += size

    def hear(self, standing: Standing) -> None:
        """A claim has been found to fit, and all that was written down then is counted here."""
        with self._lock:
            if standing.serial != self.serial:
                return  # our claim has been lowered since
            self._standing = standing
            taken = self.used + self.dying + self.hidden + standing.dead + standing.others
            # what has been written down since must not be claimed once more: others may have found
            # their claims to fit beside it in the meantime
            rest = standing.claim - (self.settled - standing.settled) - self._pending
            fits = min(rest, standing.cap - taken)
            self._credit = 0 if standing.blocked or standing.alone else max(0, fits)
            self._demand = 0 if standing.alone else self._demand // 2

    def surplus(self) -> int:
        """Bytes to drop to keep the budget, and to make a claim fit if it is needed."""
        now = self._standing
        if now.lease_until == 0.0 or now.blocked or not now.measured:
            return 0
        needed = 0 if now.alone else now.claim - self._pending + now.others
        if not self._demand:
            needed = min(needed, now.writers * self._ready(now.writers))
        return self.used + self.hidden + needed - now.cap

    # -- the keeper's side -----------------------------------------------------------------------

    @property
    def pressed(self) -> bool:
        """Whether much of what is claimed is there, and waits to be written down."""
        return 2 * self._pending > self._promised

    def settle(self, size: int) -> None:
        """So much of what was reserved is written down, or was never written and is gone."""
        with self._lock:
            self._pending -= size
            self.settled += size

    def offer(self, *, alone: bool, writers: int, cap: int) -> int:
        """The bytes to claim: what is on the way, and what will be wanted soon. That is a part of
        `cap`, the least that one of the writers says that all may hold: more would leave him no
        room. No more than that is used from now on."""
        with self._lock:
            self._shared = cap = self.told(cap)
            if alone:
                claim = max(self.capacity // _ALONE_SHARE, _ALONE_MIN)
            else:
                if self._standing.alone:
                    self.withdraw()
                most = max(self._block_bytes, cap // (_AHEAD_SHARE * writers))
                least = max(self._block_bytes, self._ready(writers))
                ahead = min(most, max(least, 4 * self._demand))
                claim = self._pending + self._held + ahead
                if claim < self._promised:
                    self.serial += 1
                    self._credit = min(self._credit, ahead)
            self._promised = claim
            return claim

    def _ready(self, writers: int) -> int:
        """What each writer has room for at any time; nothing where that is not a block."""
        blocks = self._shared // (_READY_SHARE * writers * self._block_bytes)
        return blocks * self._block_bytes

    def withdraw(self) -> None:
        """Nothing may be reserved until the next claim has been heard of."""
        with self._lock:
            self.serial += 1
            self._credit = 0
            self._standing = Standing(cap=self._standing.cap)

    def lower(self, cap: int) -> int:
        """Let other namespaces have more, but not what is already filled; what is kept."""
        with self._lock:
            now = self._standing
            bound = self.used + self.dying + self.hidden + max(0, self._credit) + self._held
            bound += now.dead + now.others
            kept = max(cap, bound)
            self.serial += 1
            self._standing = msgspec.structs.replace(now, cap=min(now.cap, kept))
            return kept
