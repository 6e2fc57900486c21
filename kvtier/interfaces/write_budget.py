"""What a tier may write now: a lease of the budget that several engines share, and a rate.

A tier's own thread spends, and its keeper's thread leases: each counter has one writer, so that
neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class WriteStats(msgspec.Struct, frozen=True):
    """What is known of the writes to a medium that has a budget."""

    rate: float
    """Bytes a second that may be written in the long run."""
    burst: float
    left: float
    """Bytes that may be written now, by all who share the budget."""
    written: float
    """By all who ever shared it, as far as it was counted."""
    drive_written: float | None = None
    """What the drives below say of their whole life; None where they cannot be asked."""
    drive_used: float | None = None
    """How much of its endurance that drive has used up, of which that is most; 1 is all."""


class WriteAllowance:
    """One engine's lease of a write budget, in bytes."""

    def __init__(self, rate: float, burst: float, block_bytes: int) -> None:
        self.rate = rate
        self.burst = burst
        self.block_bytes = block_bytes
        """What a block takes at most."""
        self.when_short: Callable[[], None] = lambda: None
        """Called when the lease does not reach for what is to be written."""
        self.shared = 0.0
        """What was left beside all leases, when that was looked at last."""
        self._written_by_others = 0.0
        self._granted = 0.0
        self.spent = 0.0
        """What was written so far."""
        self._wanted = 0.0
        self._drive: tuple[float, float] | None = None

    # -- the tier's thread -------------------------------------------------------------------

    @property
    def lease(self) -> float:
        """What may be written without asking anybody; below zero if more was written."""
        return self._granted - self.spent

    @property
    def level(self) -> float:
        """What may be written soon, with what the others may, too."""
        return self.shared + self.lease

    def spend(self, size: float) -> None:
        """So much is being written; less than nothing if it was not, after all."""
        self.spent += size

    def blocks(self, wanted: int) -> int:
        """How many of so many blocks the lease reaches for; for the rest more is asked for."""
        reached = max(0, min(wanted, int(self.lease // self.block_bytes)))
        if reached < wanted and self.shared >= self.block_bytes:
            asked, self._wanted = self._wanted, float(wanted * self.block_bytes)
            if not asked:
                self.when_short()
        return reached

    # -- the keeper's thread -----------------------------------------------------------------

    def take_wanted(self) -> float:
        """What was asked for since the last call."""
        wanted, self._wanted = self._wanted, 0.0
        return wanted

    def grant(self, size: float) -> None:
        """The lease has grown; with less than nothing, some of it was given back."""
        self._granted += size

    def tell(self, shared: float, written: float, own: float) -> None:
        """What is left beside all leases, and what all have written, the first `own` bytes of this
        engine among it."""
        self.shared = shared
        self._written_by_others = written - own

    def tell_drive(self, written: float, used: float) -> None:
        """What the drives below say of themselves."""
        self._drive = written, used

    def stats(self) -> WriteStats:
        """At this moment."""
        written = self._written_by_others + self.spent
        drive = self._drive or (None, None)
        return WriteStats(self.rate, self.burst, max(0.0, self.level), written, *drive)


BURST_S = 3600.0
"""A burst is what comes in within so long."""


class TokenBucket(msgspec.Struct):
    """So much may be spent, and so much more each second, up to a burst."""

    rate: float
    """What comes in, a second."""
    burst: float
    """The most that is kept of what was not spent."""
    level: float
    """What is left; below zero after what could not be refused."""
    at: float
    """When it was filled last, on the clock of whoever calls."""

    def fill(self, now: float) -> None:
        """Take in what has come since the last call. A clock that was put back brings nothing; one
        that was put forward brings a burst at most."""
        passed = max(0.0, now - self.at)
        self.level = min(self.burst, self.level + self.rate * passed)
        self.at = now

    def take(self, wanted: float) -> float:
        """Spend at most so much, as far as there is any; answers with what was spent."""
        granted = max(0.0, min(wanted, self.level))
        self.level -= granted
        return granted

    def put_back(self, amount: float) -> None:
        """What was taken and not needed."""
        self.level = min(self.burst, self.level + amount)

    def charge(self, amount: float) -> None:
        """What was spent without asking: it is made up for by what comes in."""
        self.level -= amount
