"""Which tiers and which keys not to ask for a while, because they failed just now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvtier.interfaces.tier import Tier
from kvtier.types import BlockKey, Outcome

_TIER_FAILS = (Outcome.IO_ERROR, Outcome.TIMEOUT)
KEYS_KEPT = 1 << 16
DOUBLINGS = 5


class Health:
    """A failed key rests, and so does a tier that fails again and again, for longer each time.

    Without it an engine whose load failed would look up, hit, and fail on the same key for ever,
    and pay a deadline for every request while a disk hangs.
    """

    def __init__(self, tiers: int, rest_seconds: float, strikes: int = 3) -> None:
        self._rest = rest_seconds
        self._strikes = strikes
        self._failing = [0] * tiers
        self._down_until = [0.0] * tiers
        self._unwell = [False] * tiers
        self._resting: list[OrderedDict[BlockKey, float]] = [OrderedDict() for _ in range(tiers)]

    def down(self, tier: int, now: float) -> bool:
        """Whether a tier is not asked now. After its rest it is, and one success clears it."""
        return now < self._down_until[tier]

    def resting(self, tier: int) -> Collection[BlockKey]:
        """Keys that this tier is not asked for."""
        return self._resting[tier].keys()

    def rest(self, tier: int, keys: Iterable[BlockKey], now: float) -> None:
        """Do not ask this tier for these keys for a while; the oldest give way."""
        resting = self._resting[tier]
        until = now + self._rest
        for key in keys:
            resting.pop(key, None)
            resting[key] = until
        while len(resting) > KEYS_KEPT:
            resting.popitem(last=False)

    def observe(self, tier: int, outcomes: Sequence[Outcome], now: float) -> None:
        """A transfer ended: one good block clears the tier, none at all is a strike. But not while
        the tier rests: all that was under way when it stood still fails with it, once."""
        if any(outcome.ok for outcome in outcomes):
            self._failing[tier] = 0
            self._down_until[tier] = 0.0
        elif not self.down(tier, now) and any(outcome in _TIER_FAILS for outcome in outcomes):
            self._failing[tier] += 1
            beyond = self._failing[tier] - self._strikes
            if beyond >= 0:
                self._down_until[tier] = now + self._rest * 2.0 ** min(beyond, DOUBLINGS)

    def tick(self, now: float, tiers: Sequence[Tier] = ()) -> None:
        """Ask again for what has rested long enough, in the order in which it failed; and a tier at
        once that knows itself to be well again: if it then fails, it rests as at first."""
        for at, tier in enumerate(tiers):
            if self._unwell[at] and not tier.unwell:
                self._down_until[at] = 0.0
                self._failing[at] = min(self._failing[at], self._strikes - 1)
            self._unwell[at] = tier.unwell
        for resting in self._resting:
            while resting and next(iter(resting.values())) <= now:
                resting.popitem(last=False)
