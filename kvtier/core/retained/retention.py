"""Retained blocks of all tiers of a chain: each tier has a list and a budget of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from kvtier.chain.plan import HOST
from kvtier.interfaces.tier import Tier
from kvtier.settings import RetainSettings, TierSettings, WritePolicy
from kvtier.types import BlockKey

_OFF = RetainSettings(share=0.0)


class Retention:
    """Passes on what is to be kept, and for how long, to every tier that decides on its blocks."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        rules: Sequence[TierSettings],
        slots: Sequence[int],
        settings: RetainSettings | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        settings = settings or _OFF
        self._max_ttl = settings.max_ttl.seconds
        self._clock = clock
        # What is only read takes nothing in, and so lets nothing go.
        self._tiers = [
            tier
            for at, (tier, rule) in enumerate(zip(tiers, rules, strict=True))
            if settings.share and (at == HOST or rule.write is not WritePolicy.NEVER)
        ]
        for tier, count in zip(tiers, slots, strict=True):
            if tier in self._tiers:
                tier.retain_at_most(int(count * settings.share))

    @property
    def on(self) -> bool:
        """Whether anything is ever retained."""
        return bool(self._tiers)

    @property
    def unwritten(self) -> bool:
        """Whether a tier has still to write down what it retains: at its next `tick`."""
        return any(tier.unwritten for tier in self._tiers)

    def retain(
        self, keys: Sequence[BlockKey], session: str, seconds: float | None = None
    ) -> list[int]:
        """Keep these blocks of a prefix, its head first, for so long, or (None) until the session
        is over; never longer than `max_ttl`. Says how many each tier has refused."""
        span = self._max_ttl if seconds is None else min(seconds, self._max_ttl)
        if not span > 0 or math.isnan(span):
            return [0] * len(self._tiers)
        until = self._clock() + span
        return [tier.retain(keys, session, until) for tier in self._tiers]

    def release(self, session: str, keys: Sequence[BlockKey] = (), *, all: bool = True) -> None:
        """A session is over (`all`), or needs these no more: what it retained goes first, and so do
        `keys`; but nothing that others retain."""
        for tier in self._tiers:
            tier.release(session, keys, all=all)

    def blocks_of(self, session: str) -> Sequence[BlockKey]:
        """What is retained for a session, in the tier that has most of it."""
        found: list[Sequence[BlockKey]] = [tier.retained_for(session) for tier in self._tiers]
        return max(found, key=len, default=[])
