"""Loads: how what a request hits comes to it, by way of host memory or straight from files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvtier.chain.context import ChainContext
from kvtier.chain.ledger import Move, SettledMove, Ticket
from kvtier.chain.lookup import Reservations
from kvtier.chain.plan import HOST, JOINING
from kvtier.chain.stats import direct
from kvtier.interfaces.mover import TransferResult
from kvtier.types import BlockKey, Outcome, Presence

_IN_TIME = 0.8
"""A load that is expected to need more of its deadline than this is not begun."""
_DIRECT_USES_KEPT = 1 << 16


class Loads:
    """Pins what is in host memory, joins moves that are under way, starts others, pins what readers
    fetch from files themselves, and learns from how all of it ends.

    A reader fetches a block from its file the first time. One that is used again is worth a slot in
    host memory, if there is room: from there it is nearer still.
    """

    def __init__(self, context: ChainContext, reservations: Reservations) -> None:
        self._context = context
        self._ledger = context.ledger
        self._reservations = reservations
        self._deadlines = [rule.load_deadline.seconds for rule in context.settings]
        self._read_directly: OrderedDict[BlockKey, None] = OrderedDict()
        if context.costs is not None:
            for link, deadline in zip(context.counters.moved, self._deadlines, strict=True):
                for way in (link, direct(link)):
                    context.costs.limit(way, deadline * _IN_TIME)

    # requests

    def pin(self, ticket: Ticket, keys: Sequence[BlockKey], origins: Sequence[int]) -> bool:
        """Pin what was found in host memory; False, and none is, if one of it is not there."""
        here = origins.count(HOST) == len(keys)
        mine = keys if here else [k for k, at in zip(keys, origins, strict=True) if at == HOST]
        if mine and not self._ledger.pin(ticket, mine):
            return False
        self._context.counters.found(HOST, mine)
        return True

    def join(self, ticket: Ticket, keys: Sequence[BlockKey], origins: Sequence[int]) -> list[Move]:
        """Wait for moves that are under way; answers with them."""
        mine = [key for key, at in zip(keys, origins, strict=True) if at == JOINING]
        for key in mine:
            source = self._ledger.joinable[key].transfer.source
            self._context.counters.found(source, [key])
        self._ledger.join(ticket, mine)
        return list(ticket.moves)

    def start(self, ticket: Ticket, keys: Sequence[BlockKey], origins: Sequence[int]) -> None:
        """Begin to bring the blocks that lower tiers have."""
        direct_tiers = self._context.direct
        # What is read from files needs no slot, and takes none that the others have reserved.
        for origin in sorted(set(origins), key=lambda at: (at in direct_tiers, at)):
            if origin > HOST:
                mine = [key for key, at in zip(keys, origins, strict=True) if at == origin]
                if origin in direct_tiers:
                    mine = self._pin_files(ticket, origin, mine)
                if mine:
                    self._promote(ticket, origin, mine)
        if len(ticket.pinned) + len(ticket.pending) + len(ticket.files) < len(keys):
            self._pin_late(ticket, keys)

    def _pin_late(self, ticket: Ticket, keys: Sequence[BlockKey]) -> None:
        """Pin what was looked up in a lower tier, and has come into host memory since: a neighbour
        may have stored it there, too."""
        taken = ticket.pending.union(ticket.pinned, ticket.files)
        lacking = [key for key in keys if key not in taken]
        found = self._context.tiers[HOST].lookup(lacking)
        here = [key for key, at in zip(lacking, found, strict=True) if at is Presence.HIT]
        if here:
            self.pin(ticket, here, [HOST] * len(here))

    def _pin_files(self, ticket: Ticket, tier: int, keys: list[BlockKey]) -> list[BlockKey]:
        """Pin what the ticket's reader will fetch itself; answers with what is to get a slot."""
        self._reservations.count_again()
        left = self._reservations.left()
        room = 0 if self._context.mover.down else min(left.slots, left.queues[tier])
        used = self._read_directly
        again = [key for key in keys if key in used]
        if len(again) > room:
            again = []
        for key in again:
            used.pop(key, None)  # it may be asked for twice
        taken = set(again)
        first = [key for key in keys if key not in taken]
        if first:
            self._context.counters.found(tier, self._ledger.pin_files(ticket, tier, first))
        used.update(dict.fromkeys(first))
        while len(used) > _DIRECT_USES_KEPT:
            used.popitem(last=False)
        return again

    def _promote(self, ticket: Ticket, source: int, keys: Sequence[BlockKey]) -> None:
        """Move blocks into host memory for a ticket, as many as there is room for."""
        context = self._context
        if context.mover.down:  # since it was reserved; nothing need make room
            return
        now = context.clock()
        deadline = min(now + self._deadlines[source], ticket.deadline)
        move = self._ledger.promote(ticket, source, keys, deadline)
        if move is None:
            return
        if not context.mover.submit(move.transfer):
            self._ledger.refuse(move)
            context.loads.rest(source, move.keys, now)
            context.counters.failed(source, [Outcome.DROPPED] * len(move.keys))
            return
        size = context.counters.found(source, move.keys)
        if context.costs is not None:
            link = context.counters.moved[source]
            move.due = context.costs.started(link, move.transfer.id, size)

    def read_directly(self, able: bool) -> None:
        """Say whether the readers of loads fetch what lies in files themselves, from now on."""
        context, counters = self._context, self._context.counters
        tiers = context.in_files if able else frozenset()
        if tiers != context.direct:
            context.direct = tiers
            counters.links = [
                direct(link) if tier in tiers else link for tier, link in enumerate(counters.moved)
            ]
            if not able:
                self._read_directly.clear()

    def end_direct(
        self, ticket: Ticket, failed: Mapping[BlockKey, Outcome], read: tuple[int, float]
    ) -> None:
        """Book how a ticket's reads from files have ended, before it is released; `read` is what
        they have fetched: bytes, and seconds."""
        context, now = self._context, self._context.clock()
        size_read, seconds = read
        for tier, keys in ticket.pinned_files:
            bad = {key: failed[key] for key in keys if key in failed}
            context.loads.observe(tier, [bad.get(key, Outcome.OK) for key in keys], now)
            context.loads.rest(tier, [k for k in bad if bad[k] is not Outcome.CANCELLED], now)
            context.counters.failed(tier, bad.values())
            if context.costs is not None and seconds > 0:
                size = sum(context.counters.sizes(keys)) if bad else size_read
                # Not by `counters.links`: this may have been the last read around host memory.
                link = direct(context.counters.moved[tier])
                context.costs.observe_load(link, size, seconds, not bad)
                seconds = 0.0

    # prefetches, and the end of all moves into host memory

    def prefetch(self, source: int, keys: Sequence[BlockKey], now: float) -> Move | None:
        """Move blocks into host memory for nobody yet, as many as there is room for; None if that
        is none. Whoever joins it still has all the time of a load (`late`)."""
        deadline = now + 2 * self._deadlines[source]
        move, _ = self._ledger.carry(source, HOST, keys, deadline, prefetch=True)
        if move is not None and not self._context.mover.submit(move.transfer):
            self._ledger.refuse(move)
            return None
        return move

    def late(self, move: Move, now: float) -> bool:
        """Whether a prefetch has had all the time that a load has."""
        return move.transfer.deadline - self._deadlines[move.transfer.source] <= now

    def hasten(self, move: Move) -> None:
        """Somebody waits for a prefetch: it is a load from now on."""
        context, source = self._context, move.transfer.source
        move.prefetch = False
        self._ledger.loading[source] += len(move.keys)
        context.mover.hasten([move.transfer.id])
        if context.costs is not None:
            size = sum(context.counters.sizes(move.keys))
            link = context.counters.moved[source]
            move.due = context.costs.started(link, move.transfer.id, size)

    def settled(self, settled: SettledMove, result: TransferResult, now: float) -> None:
        """Book the end of a move into host memory."""
        context, source = self._context, settled.move.transfer.source
        context.loads.observe(source, result.outcomes, now)
        ahead, costs = settled.move.ahead, context.costs
        if settled.failed:
            # What the source still offers would fail again at once; what was cancelled would not.
            rest = settled.failed.keys() - settled.blamed.keys()
            cancelled = Outcome.CANCELLED
            spared = (cancelled, Outcome.DROPPED) if settled.move.prefetch else (cancelled,)
            context.loads.rest(source, [k for k in rest if settled.failed[k] not in spared], now)
            # That nobody wants a prefetch any more is no failure of the tier's.
            failed = settled.failed.values()
            failures = [each for each in failed if not (ahead and each is cancelled)]
            context.counters.failed(source, failures)
        if costs is None:
            return
        link, complete = context.counters.moved[source], not settled.failed
        if not ahead:
            costs.ended(link, result.id, complete, result.busy_seconds)
            return
        # It had only a share of the link, for a part of the time at least.
        costs.ended(link, result.id, complete, result.busy_seconds, 0)
        if complete:
            size = sum(context.counters.sizes(settled.move.keys))
            costs.observe_prefetch(link, size, result.busy_seconds)
