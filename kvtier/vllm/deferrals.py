"""Why requests have to ask again, and for how long: for room, for another's load, for an answer of
a medium, for a hand-over.

vLLM asks about a request that is put off in each step, for all keys of each, and there may be
hundreds. As long as nothing has changed since one was told to wait, nobody looks for its blocks
once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier.chain.hits import Shape
from kvtier.chain.plan import COMING, NOWHERE
from kvtier.chain.queries import Query
from kvtier.chain.tier_chain import TierChain
from kvtier.cost.model import CostModel
from kvtier.cost.rates import GRACE_S
from kvtier.vllm.requests import (
    Event,
    HandoverDeferral,
    LoadDeferral,
    QueryDeferral,
    Requests,
    RequestState,
    RoomDeferral,
)

logger = logging.getLogger(__name__)

ROOM_WAIT_S = 1.0
"""How long a request waits for room where it is not known how long its prompt takes to compute."""
_LATE = 2.0
"""A load that others hold up may take somewhat longer than expected; this one is late."""
_SILENT_SHARE, _SILENT_S = 0.07, 0.05
"""Other machines that for so much of the time that computing takes, and so many seconds, neither
answer nor send anything are taken to stand still..."""
_GAPS = 4.0
"""... if that is also several times as long as lay between what they have sent."""
WAIT_S = 1.0
"""An engine stores a prompt within a second: so long is waited for it where it is not known how
long that takes to compute."""
QUERY_WAIT_S = 0.25
"""How long a request waits at most for a medium to say what it has of its prompt..."""
_QUERY_SHARE = 0.05
"""... and how long as a part of what computing the prompt takes."""
_ASK_AGAIN_S = 0.05
_DOUBT_MAX = 8
"""What comes at all comes within an eighth of a second, mostly: enough to learn that it does..."""
_APART_MAX = 32
"""... but by a bucket it takes longer. So a request waits in full now and then: at first after
twice as long as computing takes, and at last after so many times as long."""
_AWAY = (NOWHERE, COMING)
_COMPUTE, _EXPECT = "do_remote_decode", "do_remote_prefill"


@dataclass(slots=True)
class _Loading:
    """A load from a lower tier, and what it was taken to spare."""

    since: float
    expected: float
    """So many seconds."""
    start: int
    stop: int
    left: Callable[[], int] | None
    """Of a load from other machines: how many of its blocks have not come yet..."""
    query: Query | None
    """... and what they were asked last for its request."""
    missing: int
    """What was left when that was looked at last..."""
    moved: float
    """... and when something came last."""


class LoadDeadlines:
    """Knows since when each load is under way, and which of them is not worth waiting for any more.

    Nobody knows how long a load will still take that is late. Given up after as long as computing
    takes, it has cost twice that at most. That holds for an engine that has nothing to compute, and
    for one load at a time: where several are late, and the engine computes them all, the last would
    wait for the others longer than for its load. One that was expected to take longer than
    computing, because it spares others, has longer.

    What other machines have comes soon, or a machine has died or stands still: of such loads it is
    known how much of each has come. One is given up, whatever the engine computes, if they do not
    even answer, if nothing has come of any of them for much longer than usual, or none of this one
    in twice the time that all of it should take. What has come by then is used.
    """

    def __init__(
        self, costs: CostModel | None, clock: Callable[[], float], load_seconds: float
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._load_seconds = load_seconds
        self._loads: dict[int, _Loading] = {}
        self._given_up: set[int] = set()
        self._next = 0.0
        """When another may be given up, though the last has not ended yet."""
        self._look_at, self._moved = 0.0, 0.0
        """When to look again at what has come from other machines, and when something came..."""
        self._gap = 0.0
        """... and how long after what came before; 0 until something has come."""

    def room_in_time(self, since: float, start: int, stop: int) -> bool:
        """Whether a request that waits since then had better wait on, because there will be room
        for its load, and soon. It waits no longer than tokens `start:stop` take to compute, or a
        load may take where that spares others as much, and not at all for slow loads."""
        waited = self._clock() - since
        computing = self._costs.recompute_seconds(start, stop) if self._costs else None
        if self._costs is None or computing is None:
            return waited < ROOM_WAIT_S
        spared = min(self._costs.spared_seconds(start, stop), self._load_seconds)
        return waited < max(computing, spared) and self._costs.drain_seconds() < computing / 2

    def began(
        self,
        number: int,
        due: float,
        start: int,
        stop: int,
        *,
        left: Callable[[], int] | None = None,
        query: Query | None = None,
    ) -> None:
        """A load began without which the engine has to compute tokens `start:stop`; it is expected
        to end when it is `due`. Of one from other machines `left` tells how many of its blocks have
        not come yet, and `query` is what they were asked for it."""
        now = self._clock()
        missing = left() if left is not None else 0
        self._loads[number] = _Loading(now, due - now, start, stop, left, query, missing, now)

    def ended(self, number: int) -> bool:
        """It has ended; whether because it was given up."""
        self._loads.pop(number, None)
        if number not in self._given_up:
            return False
        self._given_up.remove(number)
        self._next = 0.0  # its prompt is computed from now on
        return True

    def give_up(self, busy: bool = False) -> int | None:
        """The load that the engine had better not wait for any longer, if there is one; if it is
        `busy` with something else, one that stands still."""
        now = self._clock()
        if self._costs is None:
            return None
        self._note_progress(now)
        for number, load in self._loads.items():
            computing = self._costs.recompute_seconds(load.start, load.stop)
            if computing is None or number in self._given_up:
                continue
            if self._stands_still(load, now, computing):
                self._given_up.add(number)
                return number
            if busy or now < self._next:
                continue
            if now - load.since > max(computing, _LATE * load.expected) + GRACE_S:
                self._given_up.add(number)
                self._next = now + computing
                return number
        return None

    def _note_progress(self, now: float) -> None:
        """Note which loads from other machines have moved on, now and then."""
        if now < self._look_at:
            return
        self._look_at = now + _SILENT_S / 4
        for load in self._loads.values():
            if load.left is not None and (left := load.left()) < load.missing:
                self._gap = max(now - max(self._moved, load.since), self._gap / 2)
                load.missing, load.moved, self._moved = left, now, now

    def _stands_still(self, load: _Loading, now: float, computing: float) -> bool:
        """Whether it comes from other machines, and they send nothing any more."""
        if load.left is None or not load.missing:
            return False
        patience = max(_SILENT_SHARE * computing, _SILENT_S)
        if load.query is not None and not load.query.answered and load.moved == load.since:
            return now - load.query.since > patience
        silence = now - max(self._moved, load.since)
        if self._gap and silence > max(patience, _GAPS * self._gap):
            return True
        return now - load.moved > max(patience, _LATE * load.expected)


class Deferrals:
    """Decides which requests are told to ask again, and whether that still holds.

    One whose prompt another engine has computed waits a little for its blocks: no longer than
    computing them takes, and where they do not come, less each time, but for an eighth of a second.
    Now and then one waits in full again: blocks that take longer than that do come.
    """

    def __init__(
        self,
        chain: TierChain,
        requests: Requests,
        deadlines: LoadDeadlines,
        costs: CostModel | None,
        clock: Callable[[], float],
    ) -> None:
        self._chain = chain
        self._reservations = chain.reservations
        self._requests = requests
        self._deadlines = deadlines
        self._costs = costs
        self._clock = clock
        self._doubt = 1
        self._apart, self._full_at = 2, 0.0
        """How many times as long as computing takes the waits in full lie apart, and the next."""

    def still_holds(
        self, request: str, state: RequestState, loading: Collection[bytes], *, room_comes: bool
    ) -> bool:
        """Whether one that was told to ask again would be told the same: it asks for as much, and
        nothing has changed. `room_comes` if loads or prefetches are under way, which will let go
        of what they hold, and `loading` are the blocks that vLLM waits for."""
        match state.deferral:
            case HandoverDeferral() as deferral:
                holds = self._still_to_come(deferral)
                if holds:
                    self._requests.on(Event.EXPECTED, request)
                return holds
            case QueryDeferral(until):
                answered = state.query is None or state.query.answered
                holds = not answered and self._clock() < until
                if holds:
                    self._requests.on(Event.EXPECTED, request)
                return holds
            case RoomDeferral() as deferral:
                return room_comes and self._still_no_room(request, state, deferral)
            case LoadDeferral(asked, key, taken):
                if key not in loading or asked != state.asked:
                    return False
                self._reservations.withhold(taken)
                return True
        return False

    # room

    def for_room(self, request: str, state: RequestState, end: int) -> None:
        """Tell a request to wait, of whose prompt up to `end` not all could be reserved, if there
        will be more room soon."""
        if state.deferred_since is None:
            state.deferred_since = self._clock()
        end, taken = min(state.limit, end), self._taken(state.spare)
        if self._deadlines.room_in_time(state.deferred_since, state.start, end):
            state.deferral = RoomDeferral(state.asked, end, state.spare, taken)
            self._requests.on(Event.LACKS_ROOM, request)

    def _still_no_room(self, request: str, state: RequestState, deferral: RoomDeferral) -> bool:
        since, spare = state.deferred_since, self._reservations.spare()
        if since is None or deferral.asked != state.asked:
            return False
        if any(now > then for now, then in zip(spare, deferral.spare, strict=True)):
            return False
        if not self._deadlines.room_in_time(since, state.start, deferral.end):
            return False
        self._requests.on(Event.LACKS_ROOM, request)
        self._reservations.withhold(deferral.taken)
        return True

    def _taken(self, spare: Sequence[int]) -> list[int]:
        """How much was reserved since so much was spare."""
        pairs = zip(spare, self._reservations.spare(), strict=True)
        return [max(0, before - left) for before, left in pairs]

    # another's load

    def for_load(
        self, state: RequestState, shapes: Mapping[int, Shape], loading: Collection[bytes]
    ) -> None:
        """vLLM puts off a request with hits: for one of the blocks that are being loaded."""
        key = state.shared(shapes, loading) if state.deferral is None else None
        if key is not None:
            state.deferral = LoadDeferral(state.asked, key, self._taken(state.spare))

    # an answer

    def for_query(self, request: str, state: RequestState, shapes: Mapping[int, Shape]) -> None:
        """Tell a request to wait for what media say that were asked about its blocks: mostly they
        have said it before its turn."""
        if (query := state.query) is None or query.answered:
            return
        wait = QUERY_WAIT_S
        end = min(state.limit, state.end(shapes)) if state.columns else 0
        if self._costs is not None and (
            computing := self._costs.recompute_seconds(state.start, end)
        ):
            wait = min(wait, _QUERY_SHARE * computing)
        until = query.since + wait
        if self._clock() < until:
            state.deferral = QueryDeferral(until)
            self._requests.on(Event.EXPECTED, request)

    # a hand-over

    def for_handover(self, request: str, state: RequestState, shapes: Mapping[int, Shape]) -> None:
        """Tell a request to wait if another engine has computed its prompt, and that may come."""
        expected = state.expected
        if expected is None or not any(tier.shared for tier in self._chain.tiers):
            return
        begins, stop = state.furthest(shapes)
        places = self._chain.locate(list(begins))
        lacking = [key for key, at in zip(begins, places, strict=True) if at in _AWAY]
        if lacking:
            expected.lacking, expected.wanted = lacking[-1], lacking
            most = self._computing(begins[lacking[0]], stop)
            expected.doubt = expected.doubt or self._doubted(most)
            patience = max(most / expected.doubt, WAIT_S / _DOUBT_MAX)
            expected.until = expected.since + min(most, patience)
            if self._clock() < expected.until:
                state.deferral = expected
                self._requests.on(Event.EXPECTED, request)
                return
        state.expected = None
        if lacking and self._doubt < _DOUBT_MAX:  # else of each request, as long as nothing comes
            logger.info("request %s: what another engine has computed did not come", request)
        self._doubt = min(2 * self._doubt, _DOUBT_MAX) if lacking else 1

    def _computing(self, start: int, stop: int) -> float:
        """How long tokens `start:stop` are waited for at most."""
        computing = self._costs.recompute_seconds(start, stop) if self._costs else None
        return WAIT_S if computing is None else computing

    def _doubted(self, most: float) -> int:
        """The part of `most` that the next request waits is one of so many."""
        if self._doubt > 1 and self._clock() < self._full_at:
            return self._doubt
        self._apart = 2 if self._doubt == 1 else min(2 * self._apart, _APART_MAX)
        self._full_at = self._clock() + self._apart * most
        return 1

    def _still_to_come(self, expected: HandoverDeferral) -> bool:
        """Whether nothing has changed: asked in each step, of many that may have long prompts."""
        if expected.lacking is None or self._clock() >= expected.until:
            return False
        if self._chain.queries.on:
            query = expected.query
            since = query.since if query is not None else expected.since
            if (query is None or query.answered) and self._clock() >= since + _ASK_AGAIN_S:
                expected.query = self._chain.find(expected.wanted)
        return self._chain.locate([expected.lacking])[0] in _AWAY


# A router sends a prompt to an engine that is to compute it, and sends what that one answers in
# `kv_transfer_params` with the same prompt to another. These are the words of vLLM's connectors
# from engine to engine, so that routers made for them will do.


def is_handed_over(said: object) -> bool:
    """Whether another engine has computed the prompt of a request that came with this."""
    return _says(said, _EXPECT)


def handover_answer(said: object) -> dict[str, bool] | None:
    """What to tell the engine that goes on with the prompt of a request that came with this; None
    if there is none."""
    return {_EXPECT: True, _COMPUTE: False} if _says(said, _COMPUTE) else None


def _says(said: object, name: str) -> bool:
    return isinstance(said, Mapping) and said.get(name) is True
