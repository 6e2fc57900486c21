"""The hottest blocks of lower tiers come into free host memory after a start, before they are asked
for. They move as prefetches do, behind all others, and push nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core.chain.ahead.prefetches import PIECE_BLOCKS, Prefetches
from kvtier.core.chain.in_flight import Move, Settled
from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.loads.promises import Promises
from kvtier.core.chain.loads.promotion import Promotion
from kvtier.core.chain.locator import Locator
from kvtier.core.chain.plan import HOST
from kvtier.core.interfaces.mover import Mover
from kvtier.core.interfaces.tier import Tier
from kvtier.types import BlockKey

UNDER_WAY_BLOCKS = 64
"""The most blocks that are under way at a time: what is served need not wait for more."""
LONGEST_S = 600.0
"""After so long the engine knows better what is hot than the time before its start."""


class WarmUp:
    """Fills a part of host memory, once, and ends."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        blocks: int,
        slots: int,
        ledger: Ledger,
        mover: Mover,
        locator: Locator,
        promises: Promises,
        promotion: Promotion,
        prefetches: Prefetches,
    ) -> None:
        """`blocks` is how many of its `slots` host memory may have taken then."""
        self._tiers = tiers
        self._spared = slots - blocks
        self._most = max(1, min(UNDER_WAY_BLOCKS, slots // 8))
        self._ledger = ledger
        self._mover = mover
        self._locator = locator
        self._promises = promises
        self._promotion = promotion
        self._prefetches = prefetches
        self._moves: dict[int, Move] = {}
        self._gives_way = False
        self._began = 0.0
        self.pending = blocks > 0 and any(tier.recovered for tier in tiers[HOST + 1 :])
        """Whether there may be more to be brought."""
        if not self.pending:
            self.end()

    def step(self, now: float) -> None:
        """Begin some more, unless somebody needs the links, or all is done."""
        if self._gives_way:
            self._gives_way = False
            ids = [id for id, move in self._moves.items() if move.prefetch]
            self._mover.cancel(self._ledger.abandon(ids))
            return
        if not self.pending:
            return
        self._began = self._began or now
        if self._free() <= 0 or now > self._began + LONGEST_S:
            self.end()
            return
        if self._mover.down or self._prefetches.busy or any(self._ledger.loading):
            return
        under_way = sum(len(move.keys) for move in self._moves.values())
        for source in range(HOST + 1, len(self._tiers)):
            while (room := min(self._free(), self._most - under_way, PIECE_BLOCKS)) > 0:
                told = self._tiers[source].take_hottest(room)
                if not told:
                    break
                under_way += self._start(source, told, now)
        if not self._moves:
            self.end()

    def _free(self) -> int:
        """Slots that may still be taken: nothing is evicted for this."""
        free = min(self._tiers[HOST].stats().free, self._promises.room())
        return free - self._spared

    def _start(self, source: int, told: Sequence[BlockKey], now: float) -> int:
        places = self._locator.locate(told)
        keys = [key for key, at in zip(told, places, strict=True) if at == source]
        move = self._promotion.prefetch(source, keys, now) if keys else None
        if move is None:
            return 0
        self._moves[move.transfer.id] = move
        self._promises.count_again()
        return len(move.keys)

    def settled(self, settled: Settled) -> bool:
        """Whether it was one of these moves that has ended."""
        source = settled.move.transfer.source
        if self._moves.pop(settled.move.transfer.id, None) is None:
            return False
        self._prefetches.stats.warmed[source] += len(settled.committed)
        return True

    def give_way(self) -> None:
        """A load lacks room: what nobody waits for is cancelled at the next step."""
        self._gives_way = bool(self._moves)

    def end(self) -> None:
        """No more of it."""
        self.pending = False
        for tier in self._tiers[HOST + 1 :]:
            tier.forget_hottest()
