"""How much this server may store, counted in memory.

The caretaker of a bucket gives each server a share (see `caretaker`): so many bytes beyond those
that the caretaker has found in manifests. The scheduler's thread asks only this account, and waits
for nobody. A share is a lease: it ends by itself if the server does not say in time that it lives.

A server that is the caretaker itself, with nobody beside it, has the whole capacity, and evicts by
its own policy before it stores.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

UNLIMITED = 1 << 60
"""The capacity of a command that fills a store: it has none of its own."""


def clock() -> float:
    """A clock in seconds that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Budget:
    """The account of one server. Safe for the scheduler's thread and the keeper's."""

    def __init__(self, capacity: int, block_bytes: int, clock: Callable[[], float] = clock) -> None:
        self.capacity = capacity
        """Of everything below the url, as the caretaker sees it."""
        self.used = 0
        """Bytes of all blocks of the namespace that are known or reserved."""
        self._block_bytes = block_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self.alone = False
        """Whether evicting makes room at once; if not, the caretaker makes it."""
        self._limit = 0
        """What may be used: by the whole namespace if alone, else beyond what the caretaker saw."""
        self._until = 0.0
        self._pending = 0
        """Bytes reserved that no manifest lists yet."""
        self._dropped = 0
        """Bytes of blocks that we dropped, if no manifest says so yet."""
        self._recorded: deque[tuple[int, int, int]] = deque()
        """Both, as manifests say it, by the number of the manifest, until the caretaker has read
        it, and deleted the objects that are gone."""

    # -- the scheduler's side --------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that may be reserved now."""
        with self._lock:
            if self._clock() >= self._until:
                return 0
            if self.alone:
                dropped = self._dropped + sum(size for _, _, size in self._recorded)
                return max(0, self._limit - self.used - dropped)
            return max(0, self._limit - self.unseen)

    def hold(self, blocks: int) -> tuple[int, float]:
        """For how many of these blocks there is room, and until when they may be written."""
        with self._lock:
            return min(blocks, self.room // self._block_bytes), self._until

    def evictable(self, blocks: int) -> int:
        """For how many of these blocks evicting others makes room at once."""
        with self._lock:
            if not self.alone or self._clock() >= self._until:
                return 0
            return blocks if self.used <= self._limit else 0

    def reserve(self, size: int) -> None:
        """Use room for a block that is about to be written."""
        with self._lock:
            self.used += size
            self._pending += size

    def drop(self, size: int) -> None:
        """So many bytes are offered no more, and their objects are to be deleted."""
        with self._lock:
            self._dropped += size

    # -- the keeper's side -----------------------------------------------------------------------

    @property
    def mostly_unrecorded(self) -> bool:
        """Whether half of what may be stored is in the store and not in manifests yet."""
        return not self.alone and 0 < self._limit <= 2 * self._pending

    @property
    def unseen(self) -> int:
        """Bytes reserved beyond what the caretaker has seen of our manifests."""
        with self._lock:
            return self._pending + sum(size for _, size, _ in self._recorded)

    @property
    def waits_to_be_seen(self) -> bool:
        """Whether the caretaker has not counted all of our manifests yet."""
        return bool(self._recorded)

    def settle(self, number: int, reserved: int = 0, dropped: int = 0) -> None:
        """This manifest of ours lists so many bytes that were reserved, or says that they are
        gone, and so many that were dropped."""
        with self._lock:
            self._pending -= reserved
            self._dropped -= dropped
            self._recorded.append((number, reserved, dropped))

    def grant(self, limit: int, *, seen: int, until: float, alone: bool = False) -> None:
        """What may be used from now on. `seen`: the last of our manifests that counts in it."""
        with self._lock:
            while self._recorded and self._recorded[0][0] <= seen:
                self._recorded.popleft()
            self._limit, self._until, self.alone = limit, until, alone
