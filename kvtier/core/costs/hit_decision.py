"""Decides how much of a request's hit is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvtier.core.chain.in_flight import Move
from kvtier.core.chain.plan import HOST, JOINING, plan_runs
from kvtier.core.chain.stats import Tally
from kvtier.core.costs.chunk_spans import Span
from kvtier.core.costs.hit_offers import Room, offers, stops, thin
from kvtier.core.costs.model import CostModel
from kvtier.types import BlockKey


class Decision:
    """How much of a request's hit is taken. It holds as long as the question stays the same: a
    request that waits is asked about in every step, but decided, and counted, once."""

    __slots__ = ("answer", "at_hand", "cramped", "missed", "question", "stops")

    def __init__(self, at_hand: bool = False) -> None:
        self.at_hand = at_hand
        """Only what need not be waited for is taken, and nobody counts what is looked for: that was
        done before, and did not come in time."""
        self.question: object = None
        self.missed: list[int] = []
        """How many blocks each tier was counted to miss: they come and go while a request waits."""
        self.answer = 0
        self.stops: list[int] = []
        self.cramped = False
        """Host memory had no room for more, and may have it now."""


class Appraiser:
    """Decides how much of a hit to take, and counts what was looked for."""

    def __init__(
        self,
        tally: Tally,
        costs: CostModel | None,
        joinable: Mapping[BlockKey, Move],
        clock: Callable[[], float],
    ) -> None:
        self._tally = tally
        self._costs = costs
        self._joinable = joinable
        self._clock = clock

    def lead(
        self,
        keys: Sequence[BlockKey],
        origins: Sequence[int],
        tokens_per_block: int,
        start: int,
        decision: Decision,
    ) -> int:
        """How many leading blocks of a prefix to take."""
        places = self._nearly(keys, origins, decision)
        runs = plan_runs(places, self._tally.links, self._tally.sizes(keys))
        question = (start, len(keys), runs)
        if decision.question != question:
            decision.question = question
            if not decision.at_hand:
                decision.missed = self._tally.looked_up(origins, decision.missed)
            decision.answer = sum(run.blocks for run in runs)
            if runs and self._costs is not None:
                decision.answer = self._costs.admit(runs, tokens_per_block, start)
        return decision.answer

    def furthest(
        self,
        spans: Sequence[Span],
        origins: Sequence[Sequence[int]],
        start: int,
        limit: int,
        room: Room,
        decision: Decision,
    ) -> int:
        """Up to which token to take the hit of a request with several groups, or with windows."""
        places = [
            self._nearly(span.keys, column, decision)
            for span, column in zip(spans, origins, strict=True)
        ]
        question = (start, limit, places)
        same = decision.question == question
        if same and not decision.cramped:
            return decision.answer
        if not same:
            decision.question = question
            if not decision.at_hand:
                begun = zip((start // span.shape.tokens for span in spans), origins, strict=True)
                sought = [at for first, column in begun for at in column[first:]]
                decision.missed = self._tally.looked_up(sought, decision.missed)
        found, decision.cramped = stops(spans, origins, start, limit, room)
        if not same or found != decision.stops:
            decision.stops = found
            decision.answer = self._choose(spans, places, start, thin(found))
        return decision.answer

    def _nearly(
        self, keys: Sequence[BlockKey], origins: Sequence[int], decision: Decision
    ) -> Sequence[int]:
        """Where blocks are as far as it matters. What is on its way is as good as here, unless it
        should have been here by now, and nobody knows how long it will still take; or it is
        prefetched, and has let others pass so far."""
        if JOINING not in origins:
            return origins
        if decision.at_hand:
            return [HOST if at == JOINING else at for at in origins]
        now = self._clock()
        moves = [self._joinable.get(key) for key in keys]
        return [
            move.transfer.source
            if at == JOINING and move and (move.prefetch or 0 < move.due < now)
            else HOST
            if at == JOINING
            else at
            for at, move in zip(origins, moves, strict=True)
        ]

    def _choose(
        self, spans: Sequence[Span], places: list[Sequence[int]], start: int, found: list[int]
    ) -> int:
        best = len(found) - 1
        if self._costs is not None:
            made = offers(spans, places, self._tally.links, start, found)
            best = self._costs.choose(made, start)
        return found[best] if best >= 0 else start
