"""A long-run rate with bursts."""

from __future__ import annotations

import msgspec

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
