"""Which tier can give each block, nearest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.core.chain.health import Health
from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.loads.direct_reads import DirectReads
from kvtier.core.chain.plan import HOST, NOWHERE, plan_at_hand, plan_host, plan_lower
from kvtier.core.interfaces.mover import Mover
from kvtier.core.interfaces.tier import Tier
from kvtier.types import BlockKey, Presence


class Locator:
    """Asks the tiers in order, except those that are down, and keys that failed just now."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        ledger: Ledger,
        health: Health,
        direct: DirectReads,
        mover: Mover,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._health = health
        self._direct = direct
        self._mover = mover
        self._clock = clock

    def locate(self, keys: Sequence[BlockKey], *, at_hand: bool = False) -> list[int]:
        """The nearest tier that can give each key, or NOWHERE, COMING, JOINING (see plan); with
        `at_hand` only blocks that need no waiting. It promises nothing and ignores room."""
        ledger = self._ledger
        answers = self._tiers[HOST].lookup(keys)
        if Presence.MISS not in answers and Presence.PENDING not in answers:
            return [HOST] * len(keys)
        if at_hand:
            coming = [key for key in keys if key in ledger.joinable]
            return plan_at_hand(keys, answers, set(self._tiers[HOST].arrived(coming)))
        # Their slots are not free yet: nothing could be loaded into host memory under these keys.
        lost = ledger.abandoned | ledger.dropped_pinned
        origins = plan_host(keys, answers, ledger.joinable, lost)
        sought = [at for at, origin in enumerate(origins) if origin == NOWHERE]
        if lost:
            sought = [at for at in sought if keys[at] not in lost]
        now = self._clock()
        for tier in range(HOST + 1, len(self._tiers)):
            if not sought:
                break
            if self._health.down(tier, now) or not self._reachable(tier):
                continue
            resting = self._health.resting(tier)
            skipped = [at for at in sought if keys[at] in resting] if resting else []
            if skipped:
                sought = [at for at in sought if keys[at] not in resting]
            whole = len(sought) == len(keys)
            answers = self._tiers[tier].lookup(keys if whole else [keys[at] for at in sought])
            origins, sought = plan_lower(origins, sought, tier, answers)
            sought = sorted(sought + skipped) if skipped else sought
        return origins

    def _reachable(self, tier: int) -> bool:
        """Whether blocks of a lower tier can be had: by readers of its files, or by the mover."""
        return tier in self._direct.tiers or not self._mover.down
