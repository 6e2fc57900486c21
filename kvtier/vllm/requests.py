"""What is known of each request, and what it waits for."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvtier.chain.hits import Decision, Shape, Span, kept_within, last_stop, whole, windowed, woven
from kvtier.chain.ledger import Ticket
from kvtier.chain.lookup import Reservations
from kvtier.chain.plan import COMING, NOWHERE
from kvtier.chain.tier_chain import TierChain
from kvtier.cost.model import CostModel
from kvtier.cost.rates import GRACE_S
from kvtier.types import GROUP_BYTES, BlockKey, Outcome
from kvtier.vllm.identity.prompt_keys import salted
from kvtier.vllm.protocol import Report


class Column(NamedTuple):
    """A request's keys of one cache group, in the order of its tokens."""

    group: int
    asked: list[bytes]
    """As vLLM knows them."""
    known: list[BlockKey]
    """As the tiers know them."""


class Shortage(NamedTuple):
    """The room that there was for a load when its request was told to wait for more."""

    asked: tuple[int, int]
    end: int
    """Where the hit would end that it waits for."""
    spare: Sequence[int]
    taken: Sequence[int]
    """What of it was promised to the request all the same: nobody who asks later is to have it."""


class Joined(NamedTuple):
    """What a request asked for when it was put off for a block that is loaded for another."""

    asked: tuple[int, int]
    key: bytes
    """The block, as vLLM knows it."""
    taken: Sequence[int]
    """The room that was promised to the request."""


class Expected(msgspec.Struct):
    """Of a request whose prompt another engine has computed, until all of that is in a tier, or is
    not waited for any more."""

    since: float
    until: float = 0.0
    lacking: BlockKey | None = None
    """The last block of those that it waits for: until that has come, no other is asked for."""


class RequestState(msgspec.Struct):
    """What is known of one of the engine's requests."""

    salt: bytes = b""
    """Mixed into its keys, if not empty: what vLLM's own hash leaves out."""
    kept: bool = True
    """Whether its keys say all that its blocks depend on: else nothing of it is kept."""
    refused: bool = False
    """It is offered nothing: its keys do not tell enough, or a load has failed."""
    touched: bool = False
    """The tiers know that its blocks were asked for: they count it once a request."""
    start: int = 0
    limit: int = sys.maxsize
    """The tokens between which the engine asks for a hit."""
    hits: set[bytes] | None = None
    """The answer to all questions of this step; None until the first."""
    junction: int = 0
    """The token at which this prompt goes on otherwise than one that was stored, if what a hit
    there would take is not kept."""
    columns: list[Column] = []
    ends: dict[BlockKey, tuple[int, bool]] = {}
    """Where the prompt stands after each of its blocks, and whether that is of a window; if it has
    several columns."""
    positions: int = -1
    """How many positions of keys `columns` was made of."""
    decision: Decision = msgspec.field(default_factory=Decision)
    waits: bool = False
    """It is told to ask again: host memory has no room for its load, and will have; or blocks that
    it had better load are on their way."""
    waits_since: float | None = None
    shortage: Shortage | None = None
    """Of room, where it waits for that."""
    spare: Sequence[int] = ()
    """The room that there was when it was looked up last."""
    joined: Joined | None = None
    """Where vLLM puts it off, though it is told of hits."""
    expected: Expected | None = None
    sources: Mapping[bytes, int] = {}
    """The tiers that the blocks of its load come from."""

    @property
    def asked(self) -> tuple[int, int]:
        """Between which tokens the engine asks for a hit."""
        return self.start, self.limit

    def known_as(self, keys: Sequence[bytes], epoch: bytes) -> list[BlockKey]:
        """The keys as the tiers know them: with the request's salt and the epoch in them."""
        return salted(keys, epoch + self.salt)

    def arrange(self, shapes: Mapping[int, Shape], ends: Mapping[bytes, int], epoch: bytes) -> None:
        """Sort its keys by group. What ends within a chunk is not kept here."""
        if len(ends) == self.positions:
            return
        self.positions = len(ends)
        asked: dict[bytes, list[bytes]] = {}
        tokens = {}
        for group, shape in shapes.items():
            suffix = group.to_bytes(GROUP_BYTES, "big")
            asked[suffix], tokens[suffix] = [], shape.tokens
        for key, end in ends.items():
            suffix = key[-GROUP_BYTES:]
            mine = asked.get(suffix)
            if mine is not None and end == (len(mine) + 1) * tokens[suffix]:
                mine.append(key)
        self.columns = [
            Column(group, keys, self.known_as(keys, epoch))
            for group, keys in zip(shapes, asked.values(), strict=True)
        ]
        self.ends = {}
        if len(self.columns) > 1:
            for group, _, known in self.columns:
                tokens_each, window, _ = shapes[group]
                for at, key in enumerate(known, 1):
                    self.ends[key] = (at * tokens_each, window is not None)

    def spans(self, shapes: Mapping[int, Shape], sizes: Sequence[int]) -> list[Span]:
        """Its keys and how they are kept, group by group."""
        return [Span(shapes[group], known, sizes[group]) for group, _, known in self.columns]

    def is_prefix(self, shapes: Mapping[int, Shape]) -> bool:
        """Whether its blocks are of one kind, each of use where all before it are there."""
        return len(self.columns) == 1 and shapes[self.columns[0].group].window is None

    def uses(
        self,
        shapes: Mapping[int, Shape],
        sizes: Sequence[int],
        locate: Callable[[Sequence[BlockKey]], list[int]],
    ) -> list[BlockKey]:
        """What a prompt uses: of windows and states only what it finds, and what it will keep."""
        if self.is_prefix(shapes):
            return self.columns[0].known
        spans = self.spans(shapes, sizes)
        found = self.decision.stops[-1] if self.decision.stops else 0
        if not found and self.start:  # the engine itself has all there is of it
            lesser = windowed(spans)
            places = [locate(span.keys) for span in lesser]
            found = kept_within(lesser, places, self.start) if lesser else 0
        return woven(spans, {found, self.junction, whole(spans)} - {0})

    def end(self, shapes: Mapping[int, Shape]) -> int:
        """Where the last of its chunks ends."""
        return max(len(known) * shapes[group].tokens for group, _, known in self.columns)

    def furthest(self, shapes: Mapping[int, Shape]) -> tuple[dict[BlockKey, int], int]:
        """The keys of the longest hit that there could be, with the token at which each block
        begins, in the order of these; and the token at which the hit would end."""
        spans = [Span(shapes[group], known, 0) for group, _, known in self.columns]
        windows = [span.shape for span in spans if span.shape.window is not None]
        # The engine keeps windows so that the prompt's last token can be computed with them.
        limit = self.limit - (bool(windows) and not any(shape.recurrent for shape in windows))
        stop = last_stop(spans, limit)
        needed = sorted(
            (at * span.shape.tokens, span.keys[at])
            for span in spans
            for at in span.needed(self.start, stop)
        )
        return {key: begin for begin, key in needed}, stop

    def shared(self, shapes: Mapping[int, Shape], loading: Collection[bytes]) -> bytes | None:
        """A block of its hits that is being loaded for another. Of windows, of which a hit takes
        the ends alone, it need not be one of its load."""
        hits: Collection[bytes] = (self.hits if loading else None) or ()
        for group, asked, _ in self.columns if hits else ():
            tokens, window, _ = shapes[group]
            for key in asked[self.start // tokens :] if window is None else ():
                if key in loading and key in hits:
                    return key
        return None

    def hangs_on(
        self, shapes: Mapping[int, Shape], wanted: list[BlockKey], lower: Container[BlockKey]
    ) -> tuple[int, int]:
        """From which to which token is to be computed if nothing comes from lower tiers."""
        if not self.is_prefix(shapes):
            ends = (self.ends[key][0] for key in wanted if key in self.ends)
            return self.start, max(ends, default=self.start)
        tokens = shapes[self.columns[0].group].tokens
        first = self.start // tokens
        there = next((at for at, key in enumerate(wanted) if key in lower), 0)
        return (first + there) * tokens, (first + len(wanted)) * tokens

    def as_it_grows(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Blocks of several groups in the order of their tokens: tiers take them for one prefix."""
        last = (sys.maxsize, False)
        return sorted(keys, key=lambda key: self.ends.get(key, last)) if self.ends else keys


# Who waits for the engine's time, as far as one can tell from what vLLM asks.

_REMEMBERED = 8


class _Question(NamedTuple):
    """What is known of a request that was asked about and not scheduled yet."""

    scarce: bool
    """The engine might have lacked the blocks for it."""
    short: bool
    """It was not scheduled at once, and that may have been why."""


class WaitingRequests:
    """Counts the requests that were added and have not been asked about yet.

    vLLM asks about a request when it is about to schedule it. Those that a whole step leaves
    waiting have come when the engine had more to compute than it could. Unless it was short of
    blocks: then it asks about a request, cannot schedule it, and asks again in the next step. A
    load holds blocks for as long as it takes, so it spares none of these. (Where there are blocks
    enough, something else stood in the way: what was left of a step was too little to begin with.)
    """

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._asked: dict[str, _Question] = {}
        self._told: set[str] = set()
        self._short: deque[bool] = deque(maxlen=_REMEMBERED)
        self._left = 0

    def came(self, request: str) -> None:
        """A request was added."""
        self._waiting.add(request)

    def asked(self, request: str, scarce: bool = True) -> None:
        """The engine wants to schedule this one; `scarce` if it may lack the blocks."""
        self._waiting.discard(request)
        self._told.discard(request)
        before = self._asked.get(request)
        short = before is not None and (before.short or before.scarce)
        self._asked[request] = _Question(scarce, short)

    def put_off(self, request: str) -> None:
        """It is asked about again, and not for want of blocks: another's load brings what it needs,
        or copies of its own are under way."""
        self._asked.pop(request, None)

    def told_to_wait(self, request: str) -> None:
        """It is put off for want of room that others' loads hold."""
        self.put_off(request)
        self._told.add(request)

    def scheduled(self, request: str) -> None:
        """It has its blocks now."""
        question = self._asked.pop(request, None)
        if question is not None:
            self._short.append(question.short)

    def gone(self, request: str) -> None:
        """It has ended."""
        self._waiting.discard(request)
        self._asked.pop(request, None)
        self._told.discard(request)

    def stepped(self) -> None:
        """All that the engine does in this step is settled."""
        self._left = len(self._waiting)

    @property
    def anybody(self) -> bool:
        """Whether anybody waits for the engine, be it for its time or for its blocks."""
        return bool(self._waiting or self._asked or self._told)

    @property
    def short_of_room(self) -> bool:
        """Whether somebody is put off for want of room that others' loads hold."""
        return bool(self._told)

    @property
    def behind(self) -> int:
        """How many wait for the engine's time behind the one that it asks about now."""
        if any(self._short) or any(question.short for question in self._asked.values()):
            return 0
        return min(self._left, len(self._waiting)) + len(self._told)


# Requests for whose loads host memory has no room now, and will have: they are told to ask again.
#
# vLLM does so in each step, for all keys of each of them, and there may be hundreds. As long as
# there is no more room than when one was told to wait, nobody need look for its blocks once more.


class Room:
    """Knows whether it is worth waiting for more of it."""

    def __init__(
        self,
        reservations: Reservations,
        patience: LoadDeadlines,
        crowd: WaitingRequests,
        clock: Callable[[], float],
    ) -> None:
        self._reservations = reservations
        self._patience = patience
        self._crowd = crowd
        self._clock = clock

    def awaits(self, request: str, state: RequestState, end: int) -> bool:
        """Whether a request, of whose prompt up to `end` not all could be promised, had better
        wait: there will be more room soon."""
        if state.waits_since is None:
            state.waits_since = self._clock()
        end, taken = min(state.limit, end), self._taken(state.spare)
        state.shortage = Shortage(state.asked, end, state.spare, taken)
        return self._waits(request, state.waits_since, state.start, end)

    def still_awaits(self, request: str, state: RequestState) -> bool:
        """Whether it would be told so again: it asks for the same, and nothing was set free."""
        since, short = state.waits_since, state.shortage
        if since is None or short is None or short.asked != state.asked:
            return False
        if any(
            now > then for now, then in zip(self._reservations.spare(), short.spare, strict=True)
        ):
            return False
        waits = self._waits(request, since, state.start, short.end)
        if waits:
            self._reservations.withhold(short.taken)
        return waits

    def _waits(self, request: str, since: float, start: int, end: int) -> bool:
        waits = self._patience.for_room(since, start, end)
        if waits:
            self._crowd.told_to_wait(request)
        return waits

    def joins(
        self, state: RequestState, shapes: Mapping[int, Shape], loading: Collection[bytes]
    ) -> None:
        """vLLM puts off a request with hits: for one of the blocks that are being loaded."""
        key = state.shared(shapes, loading)
        if key is not None:
            state.joined = Joined(state.asked, key, self._taken(state.spare))

    def still_joins(self, state: RequestState, loading: Collection[bytes]) -> bool:
        """Whether it will be put off again: it asks for the same, and that block is not here."""
        joined = state.joined
        if joined is None or joined.key not in loading or joined.asked != state.asked:
            return False
        self._reservations.withhold(joined.taken)
        return True

    def _taken(self, spare: Sequence[int]) -> list[int]:
        """How much was promised since so much was spare."""
        pairs = zip(spare, self._reservations.spare(), strict=True)
        return [max(0, before - left) for before, left in pairs]


# How long requests wait: for the room that others' loads hold, and for their own loads.

PATIENCE_S = 1.0
"""How long a request waits for room where it is not known how long its prompt takes to compute."""
_LATE = 2.0
"""A load that others hold up may take somewhat longer than expected; this one is late."""


class _Loading(NamedTuple):
    """A load from a lower tier, and what it was taken to spare."""

    since: float
    due: float
    start: int
    stop: int


class LoadDeadlines:
    """Knows since when each load is under way, and which of them is not worth waiting for any more.

    Nobody knows how long a load will still take that is late. Given up after as long as computing
    takes, it has cost twice that at most. That holds for an engine that has nothing to compute, and
    for one load at a time: where several are late, and the engine computes them all, the last would
    wait for the others longer than for its load. One that was expected to take longer than
    computing, because it spares others, has longer.
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

    def for_room(self, since: float, start: int, stop: int) -> bool:
        """Whether a request that waits since then had better wait on, because there will be room
        for its load, and soon. It waits no longer than tokens `start:stop` take to compute, or a
        load may take where that spares others as much, and not at all for slow loads."""
        waited = self._clock() - since
        computing = self._costs.recompute_seconds(start, stop) if self._costs else None
        if self._costs is None or computing is None:
            return waited < PATIENCE_S
        spared = min(self._costs.spared_seconds(start, stop), self._load_seconds)
        return waited < max(computing, spared) and self._costs.drain_seconds() < computing / 2

    def began(self, number: int, due: float, start: int, stop: int) -> None:
        """A load began without which the engine has to compute tokens `start:stop`; it is expected
        to end when it is `due`."""
        self._loads[number] = _Loading(self._clock(), due, start, stop)

    def ended(self, number: int) -> bool:
        """It has ended; whether because it was given up."""
        self._loads.pop(number, None)
        if number not in self._given_up:
            return False
        self._given_up.remove(number)
        self._next = 0.0  # its prompt is computed from now on
        return True

    def give_up(self) -> int | None:
        """The engine has nothing to compute: the load that it had better not wait for any longer,
        if there is one."""
        now = self._clock()
        if self._costs is None or now < self._next:
            return None
        for number, (since, due, start, stop) in self._loads.items():
            computing = self._costs.recompute_seconds(start, stop)
            if computing is None or number in self._given_up:
                continue
            if now - since > max(computing, _LATE * (due - since)) + GRACE_S:
                self._given_up.add(number)
                self._next = now + computing
                return number
        return None


# Prompts that one engine computes and another goes on with, by way of a tier that both have.
#
# A router sends a prompt to an engine that is to compute it, and sends what that one answers in
# `kv_transfer_params` with the same prompt to another, which waits a little for the blocks. These
# are the words of vLLM's connectors from engine to engine, so that routers made for them will do.

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""An engine stores a prompt within a second: so long is waited for it at least."""
_DOUBT_MAX = 8
"""What comes at all comes within an eighth of a second, mostly: enough to learn that it does."""
_AWAY = (NOWHERE, COMING)
_COMPUTE, _EXPECT = "do_remote_decode", "do_remote_prefill"


def is_expected(said: object) -> bool:
    """Whether another engine has computed the prompt of a request that came with this."""
    return _says(said, _EXPECT)


def answer(said: object) -> dict[str, bool] | None:
    """What to tell the engine that goes on with the prompt of a request that came with this; None
    if there is none."""
    return {_EXPECT: True, _COMPUTE: False} if _says(said, _COMPUTE) else None


def _says(said: object, name: str) -> bool:
    return isinstance(said, Mapping) and said.get(name) is True


class Arrivals:
    """Knows which requests had better wait for blocks that another engine has computed: no longer
    than computing them takes, and where they do not come, less each time."""

    def __init__(
        self, chain: TierChain, costs: CostModel | None, clock: Callable[[], float]
    ) -> None:
        self._chain = chain
        self._costs = costs
        self._clock = clock
        self._doubt = 1

    def awaits(self, request: str, state: RequestState, shapes: Mapping[int, Shape]) -> bool:
        """Whether a request that the engine asks about is to wait."""
        expected = state.expected
        if expected is None or len(self._chain.tiers) == 1:  # nobody else has its only tier
            return False
        begins, stop = state.furthest(shapes)
        places = self._chain.locate(list(begins))
        lacking = [key for key, at in zip(begins, places, strict=True) if at in _AWAY]
        if lacking:
            expected.lacking = lacking[-1]
            expected.until = expected.since + self._patience(begins[lacking[0]], stop)
            if self._clock() < expected.until:
                return True
        state.expected = None
        if lacking and self._doubt < _DOUBT_MAX:  # else of each request, as long as nothing comes
            logger.info("request %s: what another engine has computed did not come", request)
        self._doubt = min(2 * self._doubt, _DOUBT_MAX) if lacking else 1
        return False

    def _patience(self, start: int, stop: int) -> float:
        """How long to wait, if what lies between these tokens is not there."""
        computing = self._costs.recompute_seconds(start, stop) if self._costs else None
        return max(computing or 0.0, WAIT_S) / self._doubt

    def still_waits(self, state: RequestState) -> bool:
        """Whether nothing has changed for a request that waits: asked in each step, of many that
        may have long prompts."""
        expected = state.expected
        if expected is None or expected.lacking is None or self._clock() >= expected.until:
            return False
        return self._chain.locate([expected.lacking])[0] in _AWAY


# What workers have been asked to do and have not all reported yet.


class Pending(msgspec.Struct):
    """An errand that not all ranks have reported yet."""

    request: str
    keys: list[BlockKey]
    """As the tiers know them, in the errand's order."""
    left: int
    ticket: Ticket | None = None
    """Of a load; None for a store."""
    grown: list[BlockKey] = []
    """Those of a store in the order of their tokens."""
    report: Report | None = None
    distrusted: bool = False
    """A store of what may have been computed from blocks that were never loaded."""

    def merge(self, report: Report) -> Report | None:
        """What all ranks say, once they all have."""
        self.report = report if self.report is None else self.report.merge(report)
        self.left -= report.ranks
        return self.report if self.left <= 0 else None

    def failed(self, report: Report) -> dict[BlockKey, Outcome]:
        """What did not make it, and why."""
        failures = report.failures
        return {key: failures[at] for at, key in enumerate(self.keys) if at in failures}

    def tell_of_loss(self, outcomes: Collection[Outcome], late: bool) -> None:
        """Log that a load has not come: it failed, or was only `late`."""
        blocks, request = len(self.keys), self.request
        if late:
            logger.info(
                "a load of %d blocks for request %s takes longer than computing: it is not awaited",
                blocks,
                request,
            )
        else:
            logger.warning(
                "a load of %d blocks for request %s failed (%s): it is recomputed",
                blocks,
                request,
                ", ".join(sorted({outcome.value for outcome in outcomes})),
            )
