"""All that comes into host memory before a load asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvtier.core.chain.ahead.prefetches import Prefetches
from kvtier.core.chain.ahead.warm_up import WarmUp
from kvtier.core.chain.in_flight import Settled
from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.loads.direct_reads import DirectReads
from kvtier.core.chain.loads.promises import Promises
from kvtier.core.chain.loads.promotion import Promotion
from kvtier.core.chain.locator import Locator
from kvtier.core.chain.plan import HOST
from kvtier.core.chain.stats import Tally
from kvtier.core.chain.writes.cascade import Cascade
from kvtier.core.costs.hit_decision import Decision
from kvtier.core.costs.model import CostModel
from kvtier.core.interfaces.mover import Mover
from kvtier.core.interfaces.tier import Tier
from kvtier.core.settings import PrefetchSettings
from kvtier.types import BlockKey

_OFF = PrefetchSettings(waiting=False, restart=0.0)


class AheadOfTime:
    """Prefetches for requests that wait, and the warm-up after a start."""

    def __init__(
        self,
        settings: PrefetchSettings | None,
        tiers: Sequence[Tier],
        queues: Sequence[int],
        slots: int,
        ledger: Ledger,
        mover: Mover,
        locator: Locator,
        promises: Promises,
        promotion: Promotion,
        direct: DirectReads,
        cascade: Cascade,
        tally: Tally,
        costs: CostModel | None,
        clock: Callable[[], float],
    ) -> None:
        """`slots` is how many blocks host memory holds; without settings there is none of it."""
        settings = settings or _OFF
        self.prefetches = Prefetches(
            tiers,
            queues,
            int(slots * settings.memory) if settings.waiting else 0,
            ledger,
            mover,
            locator,
            promises,
            promotion,
            direct,
            tally,
            costs,
            clock,
            unsaved=cascade.unsaved,
            used=partial(cascade.committed, HOST),
        )
        filled = int(slots * settings.restart)
        self.warm_up = WarmUp(
            tiers, filled, slots, ledger, mover, locator, promises, promotion, self.prefetches
        )

    def make_way(self, decision: Decision, keys: Sequence[BlockKey]) -> None:
        """A load of these was decided on: if it lacks room, it will have that of prefetches, or
        what is left of a prefetch that was cancelled."""
        if decision.cramped:
            self.prefetches.give_way()
            self.warm_up.give_way()
        decision.cramped |= self.prefetches.leaving(keys)

    def settled(self, settled: Settled, now: float) -> Sequence[BlockKey]:
        """A move into host memory has ended. Answers with what it has brought to a load; of others
        the tiers between are told when they are used."""
        if not settled.move.ahead:
            return settled.committed
        if self.warm_up.settled(settled):
            return [] if settled.move.prefetch else settled.committed
        self.prefetches.settled(settled, now)
        return []

    def step(self, now: float) -> None:
        """Between two steps of the engine, when nothing is promised to anybody."""
        self.prefetches.tick(now)
        self.warm_up.step(now)

    def forget(self) -> None:
        """All tiers are empty now."""
        self.prefetches.forget()
        self.warm_up.end()
