"""What all parts of a chain share, and which tiers and keys are left alone because they failed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.chain.ledger import Ledger
from kvtier.chain.misses import MissLedger
from kvtier.chain.stats import ChainCounters
from kvtier.cost.model import CostModel
from kvtier.interfaces.mover import Mover
from kvtier.interfaces.tier import Tier
from kvtier.record.record import record_bytes
from kvtier.settings import TierSettings
from kvtier.types import BlockKey, Namespace, Outcome

_TIER_FAILS = (Outcome.IO_ERROR, Outcome.TIMEOUT)
KEYS_KEPT = 1 << 16
DOUBLINGS = 5
REST_SECONDS = 30.0


class Health:
    """A failed key rests, and so does a tier that fails again and again, for longer each time.

    Without it an engine whose load failed would look up, hit, and fail on the same key for ever,
    and pay a deadline for every request while a disk hangs.
    """

    def __init__(self, strikes: Sequence[int], rest_seconds: float) -> None:
        """For each tier, how many transfers fail in a row before it is left alone."""
        tiers = len(strikes)
        self._rest = rest_seconds
        self._strikes = strikes
        self._failing = [0] * tiers
        self._down_until = [0.0] * tiers
        self._unwell = [False] * tiers
        self._slow = [False] * tiers
        """Whether it was left alone because it took too long."""
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
            self._recovered(tier)
            self._failing[tier] = 0
        elif not self.down(tier, now) and any(outcome in _TIER_FAILS for outcome in outcomes):
            self._failing[tier] += 1
            self._slow[tier] = Outcome.TIMEOUT in outcomes
            beyond = self._failing[tier] - self._strikes[tier]
            if beyond >= 0:
                self._down_until[tier] = now + self._rest * 2.0 ** min(beyond, DOUBLINGS)

    def answers(self, tier: int) -> None:
        """It answers again: one that did not is asked again at once, but not one that was slow."""
        if not self._slow[tier]:
            self._recovered(tier)
            self._failing[tier] = min(self._failing[tier], self._strikes[tier] - 1)

    def _recovered(self, tier: int) -> None:
        """What has failed with the whole tier is asked for again with it."""
        if self._failing[tier] >= self._strikes[tier]:
            self._resting[tier].clear()
        self._down_until[tier] = 0.0

    def tick(self, now: float, tiers: Sequence[Tier] = ()) -> None:
        """Ask again for what has rested long enough, in the order in which it failed; and a tier at
        once that knows itself to be well again: if it then fails, it rests as at first."""
        for at, tier in enumerate(tiers):
            if self._unwell[at] and not tier.unwell:
                self._slow[at] = False
                self._resting[at].clear()
                self.answers(at)
            self._unwell[at] = tier.unwell
        for resting in self._resting:
            while resting and next(iter(resting.values())) <= now:
                resting.popitem(last=False)


class ChainContext:
    """The tiers of a chain with their settings and sizes, the ledgers, the mover, and the counters.

    Whether a tier is asked at all is decided here, whatever the reason: it failed again and again,
    it knows itself to be unwell, or the mover is down and nobody else reaches it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: Sequence[TierSettings],
        mover: Mover,
        namespace: Namespace,
        costs: CostModel | None = None,
        rest_seconds: float = REST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = list(tiers)
        self.settings = settings
        self.mover = mover
        self.costs = costs
        self.clock = clock
        slot = record_bytes(namespace.payload_bytes)
        self.slots = [max(1, tier.stats().bytes_capacity // slot) for tier in tiers]
        self.queues = [rule.queue_blocks for rule in settings]
        self.misses = MissLedger(sum(self.slots), clock)
        self.ledger = Ledger(self.tiers, self.misses)
        self.counters = ChainCounters([tier.medium for tier in tiers], namespace)
        strikes = [tier.strikes for tier in tiers]
        self.loads = Health(strikes, rest_seconds)
        # Apart from loads: what can no longer be written to may well be read.
        self.stores = Health(strikes, rest_seconds)
        self.in_files = frozenset(at for at, tier in enumerate(tiers) if at and tier.in_files)
        """The tiers whose records lie in local files as they are."""
        self.direct: frozenset[int] = frozenset()
        """Those of them whose files the readers of loads read themselves: their blocks need no
        slot."""

    def readable(self, tier: int, now: float) -> bool:
        """Whether blocks of a lower tier can be had now: by readers of its files, or by the
        mover."""
        reached = tier in self.direct or not self.mover.down
        return reached and not self.loads.down(tier, now)

    def writable(self, tier: int, now: float) -> bool:
        """Whether it is worth offering blocks to a lower tier now."""
        return not (self.tiers[tier].unwell or self.stores.down(tier, now))

    def left_alone(self) -> list[bool]:
        """Of each tier whether it is not asked, or not written to, now."""
        now = self.clock()
        return [
            tier.out_of_use or tier.unwell or self.loads.down(at, now) or self.stores.down(at, now)
            for at, tier in enumerate(self.tiers)
        ]
