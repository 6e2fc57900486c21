"""Requests in the engine's queue, in the order of their turns, and what is prefetched for them.

At the end of each step those that were left waiting are looked at, the next one first. Whatever of
their prompts lies only below host memory begins to come up; a request's load, at its turn, joins
that. See `kvtier.chain.prefetch` for what bounds it.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvtier.chain.hits import HitRoom, Shape, asked, columns, needed, stops
from kvtier.chain.plan import leading
from kvtier.chain.tier_chain import TierChain
from kvtier.cost.model import CostModel
from kvtier.types import BlockKey
from kvtier.vllm.requests import Requests, RequestState

LOOKED_AT = 256
"""So many of those that wait are thought of: what is behind them is far from its turn."""
NEW_LOOKS = 4
"""For so many a step finds out what they will ask for, in a fraction of a millisecond each."""
LOOK_AGAIN_S = 0.25
"""How soon it is looked again for what another engine is just storing, or what was not found: after
that the pause doubles each time."""
_FOLLOWS = 0.2
_NO_LIMIT = 1 << 40


class Waits(NamedTuple):
    """A request in the queue."""

    rank: tuple[float, ...]
    """Its turn comes before those of higher ranks; of equal ones in the order of coming."""
    ends: Mapping[bytes, int]
    """Its keys with the token after each, in order, group by group."""
    limit: int
    """The token up to which it may load."""
    cached: Callable[[bytes], bool]
    """Whether the engine itself has the last block of this key's chunk."""


class _Waiting(msgspec.Struct, eq=False):
    turn: tuple[float, ...]
    request: str
    waits: Waits
    came_at: float
    looked: bool = False
    begun: bool = False
    short: bool = False
    """Whether less was found than it could use: more may become known while it waits."""
    pause_s: float = LOOK_AGAIN_S
    again_at: float = 0.0
    start: int = 0
    stop: int = 0
    sizes: Sequence[int] = ()
    """Bytes to be brought from each tier."""
    seconds: float = 0.0
    """How long what is behind them takes to compute."""


class WaitingPrefetches:
    """Knows who waits, and lets the chain prefetch for them as far as it pays."""

    def __init__(
        self,
        chain: TierChain,
        costs: CostModel | None,
        group_bytes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain = chain
        self._costs = costs
        self._group_bytes = group_bytes
        self._clock = clock
        self._queue: list[_Waiting] = []
        self._known: dict[str, _Waiting] = {}
        self._came = 0
        self._turns_s = 0.0
        """How long one turn comes after the other while requests wait; 0 while nobody knows."""
        self._last_turn = 0.0
        self._seen = 0
        """So many of those that came were there when the last step ended."""
        self._open: set[str] = set()
        """Those for whom there is something to be done yet."""
        self.due = False
        """Whether somebody came since the last step."""

    # -- who waits -----------------------------------------------------------------------------

    def came(self, request: str, waits: Waits) -> None:
        """A request was added to the queue."""
        self.left(request, served=False)
        self._came += 1
        turn = (*waits.rank, float(self._came))
        waiting = _Waiting(turn, request, waits, self._clock())
        self._known[request] = waiting
        self._open.add(request)
        insort(self._queue, waiting, key=lambda each: each.turn)
        self.due = True

    def left(self, request: str, *, served: bool) -> None:
        """It does not wait any more: it was scheduled (`served`), or has ended."""
        waiting = self._known.pop(request, None)
        if waiting is None:
            return
        at = bisect_left(self._queue, waiting.turn, key=lambda each: each.turn)
        del self._queue[at]
        self._open.discard(request)
        self._chain.prefetches.end(request, served=served)
        if served and waiting.turn[-1] <= self._seen:
            self._note_turn()

    def _note_turn(self) -> None:
        now = self._clock()
        if self._last_turn:
            between = now - self._last_turn
            self._turns_s += _FOLLOWS * (between - self._turns_s) if self._turns_s else between
        self._last_turn = now

    def forget(self) -> None:
        """All tiers are empty, and those that wait have other keys."""
        self._open.clear()

    # -- what is done for them -------------------------------------------------------------------

    def step(self, requests: Requests, shapes: Mapping[int, Shape], epoch: bytes) -> None:
        """Once a step: begin what there is room for, in the order of the queue."""
        self.due = False
        if not self._queue:
            self._last_turn = 0.0
            return
        self._seen = self._came
        if not self._open:
            return
        looks, before, now = NEW_LOOKS, 0.0, self._clock()
        for place, waiting in enumerate(self._queue[:LOOKED_AT]):
            request, state = waiting.request, requests.get(waiting.request)
            if request in self._open and state is not None and state.identified:
                if not waiting.looked and now >= waiting.again_at:
                    if not looks:
                        return
                    looks -= 1
                    self._look(waiting, state, shapes, epoch, now)
                if waiting.looked and (waiting.begun or now >= waiting.again_at):
                    wait_s = max(before, (place + 1) * self._turns_s, now - waiting.came_at)
                    pays = self._pays(waiting, wait_s)
                    if pays and not self._chain.prefetches.begin(request):
                        waiting.begun = True
                        return  # nobody behind it goes first
                    if waiting.begun and not pays:
                        self._chain.prefetches.stop(request)
                    if waiting.short and (waiting.begun or pays):
                        waiting.looked = waiting.begun = False
                        waiting.again_at, waiting.pause_s = (
                            now + waiting.pause_s,
                            2 * waiting.pause_s,
                        )
                    else:
                        if waiting.begun or pays:
                            self._open.discard(request)
                        waiting.again_at = now + LOOK_AGAIN_S  # it may pay yet, if it waits longer
            before += waiting.seconds

    def _look(
        self,
        waiting: _Waiting,
        state: RequestState,
        shapes: Mapping[int, Shape],
        epoch: bytes,
        now: float,
    ) -> None:
        """Find out what it will ask for. What another engine is just storing may yet come."""
        state.arrange(shapes, waiting.waits.ends, epoch)
        keys: Sequence[BlockKey] = []
        waiting.short = False
        if not state.refused and state.columns:
            if self._chain.queries.on and waiting.pause_s > LOOK_AGAIN_S:  # not the first look
                self._chain.find([key for _, _, known in state.columns for key in known])
            keys, waiting.start, waiting.stop = self._wanted(state, waiting.waits, shapes)
            chunk = max(shape.tokens for shape in shapes.values())
            waiting.short = waiting.stop + chunk <= waiting.waits.limit
        if keys:
            waiting.sizes = self._chain.prefetches.want(waiting.request, keys)
        if self._costs is not None:
            computing = self._costs.recompute_seconds(waiting.stop, waiting.waits.limit)
            waiting.seconds = computing or 0.0
        waiting.looked, waiting.again_at = state.expected is None, now
        if not waiting.looked:
            waiting.again_at += LOOK_AGAIN_S
            self._chain.prefetches.begin(waiting.request)

    def _wanted(
        self, state: RequestState, waits: Waits, shapes: Mapping[int, Shape]
    ) -> tuple[Sequence[BlockKey], int, int]:
        """The keys of the longest hit that there could be, and between which tokens that is."""
        start = self._in_engine(state, waits, shapes)
        if state.is_prefix(shapes):
            ((group, _, known),) = state.columns
            tokens = shapes[group].tokens
            first = start // tokens
            keys = known[first : waits.limit // tokens]
            places = self._chain.locate(keys)
            lead = leading(places)
            return keys[:lead], first * tokens, (first + lead) * tokens
        spans = state.spans(shapes, self._group_bytes)
        places_by_group = columns(spans, start, self._chain.locate(asked(spans, start)))
        room = HitRoom(_NO_LIMIT, (), (), {})
        found, _ = stops(spans, places_by_group, start, waits.limit, room)
        if not found:
            return [], start, start
        keys, _ = needed(spans, places_by_group, start, found[-1])
        return keys, start, found[-1]

    @staticmethod
    def _in_engine(state: RequestState, waits: Waits, shapes: Mapping[int, Shape]) -> int:
        """Up to which token the engine itself has a prompt, as its blocks leave it from the end."""
        ends = []
        for group, keys, _ in state.columns:
            if shapes[group].window is None:
                chunks = bisect_left(
                    range(len(keys)), True, key=lambda at: not waits.cached(keys[at])
                )
                ends.append(chunks * shapes[group].tokens)
        return min(ends, default=0)

    def _pays(self, waiting: _Waiting, wait_s: float) -> bool:
        """Whether what a request will ask for can be here before its turn has come, and it has been
        computed instead; or before those that wait for that have lost as much."""
        if self._costs is None or not (self._turns_s and any(waiting.sizes)):
            return True
        start, stop = waiting.start, waiting.stop
        computing = self._costs.recompute_seconds(start, stop)
        if computing is None:
            return True
        spared = max(computing, self._costs.spared_seconds(start, stop))
        return self._chain.prefetches.takes_seconds(waiting.sizes) <= wait_s + spared
