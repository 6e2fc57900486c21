"""What lookup promises: room for every hit, in host memory and with the mover, until the engine's
step is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.loads.direct_reads import DirectReads
from kvtier.core.chain.plan import HOST, plan_queue, plan_room
from kvtier.core.costs.hit_offers import Room
from kvtier.core.interfaces.tier import Tier
from kvtier.types import BlockKey


class Promises:
    """Keeps account of host memory's slots and of the loads that may be under way: what is taken,
    and what was promised. `queues` is how many blocks of each tier the mover has at most."""

    def __init__(
        self,
        host: Tier,
        slots: int,
        queues: Sequence[int],
        ledger: Ledger,
        direct: DirectReads,
    ) -> None:
        self._host = host
        self._slots = slots
        self._queues = queues
        self._ledger = ledger
        self._direct = direct
        self._free: int | None = None
        self._queued: Counter[int] = Counter()
        """Blocks promised from each lower tier; some of them may be under way already."""
        self._withheld = [0] * len(queues)
        """Host slots, and blocks of each lower tier, that are kept for requests which wait and are
        not asked about again in this step."""
        self.kept = ledger.promised

    @property
    def made(self) -> bool:
        """Whether there is anything to be ended."""
        return bool(self.kept or self._queued) or self._free is not None or any(self._withheld)

    @property
    def slotless(self) -> frozenset[int]:
        """The tiers whose blocks do not come through host memory."""
        return self._direct.tiers

    def room(self) -> int:
        """Host slots that hits can still be promised."""
        if self._free is None:
            host = self._host.stats()
            self._free = self._slots - host.pinned - host.in_flight - host.quarantined
        return self._free - len(self.kept) - self._withheld[HOST]

    def spare(self) -> list[int]:
        """Host slots, and blocks of each lower tier, that can still be promised."""
        return [self.room(), *map(self._queue, range(HOST + 1, len(self._queues)))]

    def withhold(self, taken: Sequence[int]) -> None:
        """Promise so much of `spare` to nobody in this step, without saying for which keys."""
        self._withheld = [a + b for a, b in zip(self._withheld, taken, strict=True)]

    def left(self) -> Room:
        """What can still be promised to a request, wherever its blocks are."""
        tiers = range(HOST + 1, len(self._queues))
        if any(self._queue(tier) < self._queues[tier] // 2 for tier in tiers):
            self._queued = Counter(self.kept.values())
        queues = {tier: max(0, self._queue(tier)) for tier in tiers}
        return Room(self.room(), self.kept, self.slotless, queues)

    def _queue(self, tier: int) -> int:
        loading, withheld = self._ledger.loading[tier], self._withheld[tier]
        return self._queues[tier] - loading - self._queued[tier] - withheld

    def make(self, keys: Sequence[BlockKey], origins: list[int]) -> list[int]:
        """Take back what there is no room for, and hold the room of the rest."""
        slotless = self.slotless
        origins = plan_room(keys, origins, self.kept, self.room(), slotless)
        for tier in range(HOST + 1, len(self._queues)):
            if tier in slotless or tier not in origins:
                continue
            if origins.count(tier) > self._queue(tier):
                self._queued = Counter(self.kept.values())
                origins = plan_queue(keys, origins, self.kept, tier, self._queue(tier))
            self._queued[tier] += origins.count(tier)
        hits = zip(keys, origins, strict=True)
        if min(origins, default=HOST) >= HOST and not slotless:
            self.kept.update(hits)
        else:
            self.kept.update([hit for hit in hits if hit[1] >= HOST and hit[1] not in slotless])
        return origins

    def count_again(self) -> None:
        """Slots may have been taken, or set free."""
        self._free = None

    def end(self) -> None:
        """What was promised no longer is."""
        self.kept.clear()
        self._queued.clear()
        self._withheld = [0] * len(self._queues)
        self._free = None
