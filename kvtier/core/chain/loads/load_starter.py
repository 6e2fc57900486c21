"""Begins the loads of a request's blocks that are not in host memory."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.core.chain.ahead.prefetches import Prefetches
from kvtier.core.chain.in_flight import Ticket
from kvtier.core.chain.ledger import Ledger
from kvtier.core.chain.loads.direct_reads import DirectReads
from kvtier.core.chain.loads.promises import Promises
from kvtier.core.chain.loads.promotion import Promotion
from kvtier.core.chain.plan import HOST, JOINING
from kvtier.core.chain.stats import Tally
from kvtier.core.interfaces.mover import Mover
from kvtier.types import BlockKey


class LoadStarter:
    """Joins promotions that are under way, starts others, and pins what is read from files."""

    def __init__(
        self,
        ledger: Ledger,
        promotion: Promotion,
        direct: DirectReads,
        promises: Promises,
        prefetches: Prefetches,
        mover: Mover,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._promotion = promotion
        self._direct = direct
        self._promises = promises
        self._prefetches = prefetches
        self._mover = mover
        self._tally = tally
        self._clock = clock

    def start(self, ticket: Ticket, keys: list[BlockKey], origins: list[int]) -> None:
        """Begin to move in all blocks of `keys` that are not in host memory."""
        # What is read from files needs no slot, and takes none that the others were promised.
        for origin in sorted(set(origins), key=lambda at: (at in self._direct.tiers, at)):
            mine = [key for key, from_ in zip(keys, origins, strict=True) if from_ == origin]
            if origin == JOINING:
                for key in mine:
                    self._tally.found(self._ledger.joinable[key].transfer.source, [key])
                self._ledger.join(ticket, mine)
                for move in ticket.moves:
                    self._prefetches.joined(move, ticket.pending)
            elif origin > HOST:
                if origin in self._direct.tiers:
                    self._promises.count_again()
                    left = self._promises.left()
                    room = 0 if self._mover.down else min(left.slots, left.queues[origin])
                    mine = self._direct.start(ticket, origin, mine, room)
                if mine:
                    self._promotion.start(ticket, origin, mine, self._clock())
