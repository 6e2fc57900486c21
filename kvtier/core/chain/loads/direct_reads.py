"""The way around host memory: readers that fetch blocks from the files of a lower tier themselves.

A block takes it the first time. One that is used again is worth a slot in host memory, if there is
room: from there it is nearer still. Whoever pins here is told how the reads ended, as for a move.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvtier.core.chain.health import Health
from kvtier.core.chain.in_flight import Ticket
from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.stats import Tally, direct
from kvtier.core.costs.model import CostModel
from kvtier.core.interfaces.tier import Tier
from kvtier.types import BlockKey, Outcome

_USES_KEPT = 1 << 16


class DirectReads:
    """Decides which blocks are read directly, pins them, and learns from how the reads end."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        ledger: Ledger,
        health: Health,
        tally: Tally,
        costs: CostModel | None,
    ) -> None:
        self._in_files = frozenset(
            index for index, tier in enumerate(tiers) if index and tier.in_files
        )
        self._ledger = ledger
        self._health = health
        self._tally = tally
        self._costs = costs
        self._used: OrderedDict[BlockKey, None] = OrderedDict()
        self.tiers: frozenset[int] = frozenset()
        """Those whose blocks need no slot now."""

    def allow(self, able: bool) -> None:
        """Whether the readers can do it, from now on."""
        tiers = self._in_files if able else frozenset()
        if tiers == self.tiers:
            return
        if not able:
            self._used.clear()
        self.tiers = tiers
        self._tally.links = [
            direct(link) if tier in self.tiers else link
            for tier, link in enumerate(self._tally.moved)
        ]

    def start(
        self, ticket: Ticket, tier: int, keys: Sequence[BlockKey], room: int
    ) -> list[BlockKey]:
        """Pin what the ticket's reader will fetch itself; answers with what is to get a slot."""
        again = [key for key in keys if key in self._used]
        if len(again) > room:
            again = []
        for key in again:
            self._used.pop(key, None)  # it may be asked for twice
        taken = set(again)
        first = [key for key in keys if key not in taken]
        if first:
            self._tally.found(tier, self._ledger.pin_files(ticket, tier, first))
        for key in first:
            self._used[key] = None
        while len(self._used) > _USES_KEPT:
            self._used.popitem(last=False)
        return again

    def ended(
        self,
        ticket: Ticket,
        failed: Mapping[BlockKey, Outcome],
        bytes_read: int,
        seconds: float,
        now: float,
    ) -> None:
        """Book how a ticket's reads have ended, before it is released."""
        for tier, keys in ticket.pinned_files:
            bad = {key: failed[key] for key in keys if key in failed}
            self._health.observe(tier, [bad.get(key, Outcome.OK) for key in keys], now)
            self._health.rest(tier, [k for k in bad if bad[k] is not Outcome.CANCELLED], now)
            self._tally.failed(tier, bad.values())
            if self._costs is not None and seconds > 0:
                size = sum(self._tally.sizes(keys)) if bad else bytes_read
                # Not by `tally.links`: this may have been the last read around host memory.
                link = direct(self._tally.moved[tier])
                self._costs.observe_load(link, size, seconds, not bad)
                seconds = 0.0
