"""Loads: how what a request hits is brought to it, for engines and for embedders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvtier.chain.ledger import Ledger, Ticket, split
from kvtier.chain.lookup import DirectReads, Promises
from kvtier.chain.plan import HOST, JOINING
from kvtier.chain.prefetch import Prefetches
from kvtier.chain.promotion import Promotion
from kvtier.chain.stats import Tally
from kvtier.interfaces.mover import Mover
from kvtier.types import BlockKey, Outcome


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


# Loads without requests, as every tier has them: pins are counted by key, whoever took them.


class EmbeddedLoads:
    """The tickets of callers that name no request, and what of them is still to be read."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._unread: list[tuple[Ticket, Counter[BlockKey]]] = []

    def add(self, ticket: Ticket, keys: Sequence[BlockKey]) -> None:
        """Somebody reads these, and will say so key by key."""
        if keys:
            self._unread.append((ticket, Counter(keys)))
        else:
            self._ledger.release(ticket)

    def end(self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None) -> None:
        """These have been read once each, by the oldest tickets that have them."""
        left = keys
        for ticket, unread in list(self._unread):
            mine, left = split(left, unread)
            if not mine:
                continue
            unread.subtract(mine)
            done = not any(unread.values())
            self._ledger.release(ticket, None if done else mine, failed)
            if done:
                self._unread.remove((ticket, unread))
