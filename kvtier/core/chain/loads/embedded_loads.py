"""Loads without requests, as every tier has them: pins are counted by key, whoever took them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvtier.core.chain.in_flight import Ticket, split
from kvtier.core.chain.ledger import Ledger
from kvtier.types import BlockKey, Outcome


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
