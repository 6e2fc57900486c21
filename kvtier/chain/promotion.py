"""The way up: blocks of lower tiers on their way into host memory, for requests that wait."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.chain.health import Health
from kvtier.chain.ledger import Ledger, Move, Settled, Ticket
from kvtier.chain.stats import Tally, direct
from kvtier.cost.model import CostModel
from kvtier.interfaces.mover import Mover, TransferResult
from kvtier.settings import TierSettings
from kvtier.types import BlockKey, Outcome

_IN_TIME = 0.8
"""A load that is expected to need more of its deadline than this is not begun."""


class Promotion:
    """Starts loads and learns from how they end."""

    def __init__(
        self,
        settings: Sequence[TierSettings],
        ledger: Ledger,
        mover: Mover,
        health: Health,
        tally: Tally,
        costs: CostModel | None,
    ) -> None:
        self._deadlines = [rule.load_deadline.seconds for rule in settings]
        self._ledger = ledger
        self._mover = mover
        self._health = health
        self._tally = tally
        self._costs = costs
        if costs is not None:
            for link, deadline in zip(tally.moved, self._deadlines, strict=True):
                for way in (link, direct(link)):
                    costs.limit(way, deadline * _IN_TIME)

    def start(self, ticket: Ticket, source: int, keys: Sequence[BlockKey], now: float) -> None:
        """Move blocks into host memory for a ticket, as many as there is room for."""
        if self._mover.down:  # since it was promised; nothing need make room
            return
        deadline = min(now + self._deadlines[source], ticket.deadline)
        transfer = self._ledger.promote(ticket, source, keys, deadline)
        if transfer is None:
            return
        if not self._mover.submit(transfer):
            self._ledger.refuse(transfer)
            self._health.rest(source, transfer.keys, now)
            self._tally.failed(source, [Outcome.DROPPED] * len(transfer.keys))
            return
        size = self._tally.found(source, transfer.keys)
        if self._costs is not None:
            link = self._tally.moved[source]
            ticket.moves[-1].due = self._costs.started(link, transfer.id, size)

    def prefetch(self, source: int, keys: Sequence[BlockKey], now: float) -> Move | None:
        """Move blocks into host memory for nobody yet, as many as there is room for; None if that
        is none. Whoever joins it still has all the time of a load (`late`)."""
        move = self._ledger.prefetch(source, keys, now + 2 * self._deadlines[source])
        if move is not None and not self._mover.submit(move.transfer):
            self._ledger.refuse(move.transfer)
            return None
        return move

    def late(self, move: Move, now: float) -> bool:
        """Whether a prefetch has had all the time that a load has."""
        return move.transfer.deadline - self._deadlines[move.transfer.source] <= now

    def hasten(self, move: Move) -> None:
        """Somebody waits for a prefetch: it is a load from now on."""
        source = move.transfer.source
        move.prefetch = False
        self._ledger.loading[source] += len(move.keys)
        self._mover.hasten([move.transfer.id])
        if self._costs is not None:
            size = sum(self._tally.sizes(move.keys))
            move.due = self._costs.started(self._tally.moved[source], move.transfer.id, size)

    def settled(self, settled: Settled, result: TransferResult, now: float) -> None:
        """Book the end of a load."""
        source = settled.move.transfer.source
        self._health.observe(source, result.outcomes, now)
        # What the source still offers would fail again at once; what was cancelled would not.
        rest = settled.failed.keys() - settled.blamed.keys()
        cancelled = Outcome.CANCELLED
        spared = (cancelled, Outcome.DROPPED) if settled.move.prefetch else (cancelled,)
        self._health.rest(source, [k for k in rest if settled.failed[k] not in spared], now)
        ahead, failed = settled.move.ahead, settled.failed.values()
        # That nobody wants a prefetch any more is no failure of the tier's.
        self._tally.failed(source, [each for each in failed if not (ahead and each is cancelled)])
        if self._costs is None:
            return
        link, complete = self._tally.moved[source], not settled.failed
        if not ahead:
            self._costs.ended(link, result.id, complete, result.busy_seconds)
            return
        # It had only a share of the link, for a part of the time at least.
        self._costs.ended(link, result.id, complete, result.busy_seconds, 0)
        if complete:
            size = sum(self._tally.sizes(settled.move.keys))
            self._costs.observe_prefetch(link, size, result.busy_seconds)
