"""Asks media what they hold, where only they can tell: ahead of a request's turn, in one batch.

A tier whose medium others write to, and evict from, knows of it what it has been told
(`Tier.finds`). What it answers from memory is a promise that may fail, like every hit. The chain
has the medium asked again when a request comes: by the mover, as a transfer that moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import msgspec

from kvtier.chain.context import ChainContext
from kvtier.chain.lookup import locate
from kvtier.chain.plan import HOST, NOWHERE
from kvtier.interfaces.mover import Transfer, TransferKind, TransferResult
from kvtier.types import BlockKey, Outcome, block_key

ANSWER_S = 1.0
"""A medium that takes longer to say what it has is left alone for a while."""
PROBE_S = 1.0
"""So often one that is left alone is asked whether it answers again."""
_PROBE = block_key(bytes(32), 0)
"""A key that no block has."""
_ANSWERS = (Outcome.OK, Outcome.GONE)


class Query(msgspec.Struct, eq=False):
    """What was asked for one request."""

    since: float
    left: int = 0
    """So many media have not answered yet."""

    @property
    def answered(self) -> bool:
        """Whether a lookup finds all that there is to be found."""
        return self.left == 0


class Queries:
    """The queries under way, and the tiers they are for. For one thread, like the chain."""

    def __init__(self, context: ChainContext) -> None:
        self._context = context
        tiers = range(HOST + 1, len(context.tiers))
        self._tiers = [tier for tier in tiers if context.tiers[tier].finds]
        self.on = bool(self._tiers)
        """Whether there is anybody to be asked."""
        self._probed = dict.fromkeys(self._tiers, 0.0)
        # Below zero: those of the ledger's transfers are above.
        self._ids = count(-1, -1)
        self._asked: dict[int, tuple[Transfer, Query]] = {}

    @property
    def pending(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._asked)

    def ask(self, keys: Sequence[BlockKey]) -> Query:
        """Ask the media that alone know what they hold for what the tiers above lack of these; what
        they say is found by later lookups. Call it when a request comes, before its turn."""
        now = self._context.clock()
        query = Query(now)
        if not self._tiers or self._context.mover.down:
            return query
        origins = locate(self._context, keys)
        for tier in self._tiers:
            if self._context.readable(tier, now):
                # What is on its way into host memory is not worth the query.
                places = zip(keys, origins, strict=True)
                mine = [key for key, at in places if at == NOWHERE or at >= tier]
                self._submit(tier, mine, query)
        return query

    def _submit(self, tier: int, keys: Sequence[BlockKey], query: Query) -> None:
        asked, spec = self._context.tiers[tier].prepare_find(keys)
        if spec is None:
            return
        transfer = Transfer(
            id=next(self._ids),
            kind=TransferKind.FIND,
            source=tier,
            target=tier,
            keys=asked,
            source_spec=spec,
            target_spec=spec,
            deadline=self._context.clock() + ANSWER_S,
        )
        if self._context.mover.submit(transfer):
            self._asked[transfer.id] = transfer, query
            query.left += 1

    def settled(self, result: TransferResult, now: float) -> None:
        """Tell a tier what its medium has answered."""
        transfer, query = self._asked.pop(result.id)
        query.left -= 1
        self._context.tiers[transfer.source].complete_find(transfer.keys, result.outcomes)
        answers = any(outcome in _ANSWERS for outcome in result.outcomes)
        for health in (self._context.loads, self._context.stores):
            if answers:
                health.answers(transfer.source)
            elif Outcome.DROPPED not in result.outcomes:  # with the mover
                health.observe(transfer.source, [Outcome.IO_ERROR], now)

    def step(self, now: float) -> None:
        """Ask those that failed whether they answer again."""
        context = self._context
        for tier in self._tiers:
            failing = context.loads.down(tier, now) or context.stores.down(tier, now)
            if failing and now >= self._probed[tier] + PROBE_S and not context.mover.down:
                self._probed[tier] = now
                self._submit(tier, [_PROBE], Query(now))
