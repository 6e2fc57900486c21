"""How much of a prompt is worth loading: prefixes, windows, and groups of layers.

A group with a window needs only the last chunks before the end of a hit, a recurrent state only the
very last, and a hit ends where every group has what it needs. So a longer hit is not a shorter one
and something more: each is an offer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import accumulate, islice, takewhile
from typing import NamedTuple

from kvtier.chain.ledger import Move
from kvtier.chain.plan import COMING, HOST, JOINING, NOWHERE, plan_runs
from kvtier.chain.stats import ChainCounters
from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE, LoadRun, Offer
from kvtier.types import BlockKey


class Shape(NamedTuple):
    """How a cache group keeps a prompt."""

    tokens: int
    """Of one chunk."""
    window: int | None = None
    """How many chunks before its end a hit needs; None for all."""
    recurrent: bool = False
    """A chunk is a state after its last token, and of no use to a hit that ends within it."""


class Span(NamedTuple):
    """The chunks of a request in one cache group, from its first token on."""

    shape: Shape
    keys: Sequence[BlockKey]
    bytes: int
    """Of one chunk."""

    def needed(self, start: int, stop: int) -> range:
        """The chunks that have to be loaded for a hit on tokens `start:stop`."""
        tokens, window, _ = self.shape
        first, last = start // tokens, -(-stop // tokens)
        return range(first if window is None else max(first, last - window), last)


def asked(spans: Sequence[Span], start: int) -> list[BlockKey]:
    """All keys of a request from token `start` on, group by group."""
    return [key for span in spans for key in span.keys[start // span.shape.tokens :]]


def columns(spans: Sequence[Span], start: int, found: Sequence[int]) -> list[list[int]]:
    """What was found for `asked`, by group and chunk; nothing is known of earlier chunks."""
    places = iter(found)
    firsts = [start // span.shape.tokens for span in spans]
    return [
        [NOWHERE] * first + list(islice(places, max(0, len(span.keys) - first)))
        for span, first in zip(spans, firsts, strict=True)
    ]


def needed(
    spans: Sequence[Span], origins: Sequence[Sequence[int]], start: int, stop: int
) -> tuple[list[BlockKey], list[int]]:
    """The keys that a hit on tokens `start:stop` takes, and where they are."""
    keys: list[BlockKey] = []
    places: list[int] = []
    for span, column in zip(spans, origins, strict=True):
        if stop > start:
            chunks = span.needed(start, stop)
            keys += span.keys[chunks.start : chunks.stop]
            places += column[chunks.start : chunks.stop]
    return keys, places


def last_stop(spans: Sequence[Span], limit: int) -> int:
    """Where the longest hit ends that there could be."""
    step = max(span.shape.tokens for span in spans)
    recurrent = any(span.shape.recurrent for span in spans)
    return min(whole(spans), (limit - recurrent) // step * step)


def junction(
    spans: Sequence[Span], origins: Sequence[Sequence[int]], start: int, limit: int
) -> int:
    """Up to which token a prompt is known, though no hit can end there: all groups without a window
    have it, one with a window or a state does not. Prompts part there; 0 if they do not."""
    unbounded = [span.shape.window is None for span in spans]
    if all(unbounded) or not any(unbounded):
        return 0
    step = max(span.shape.tokens for span in spans)
    end = min(limit - 1, whole(spans))
    for span, column, each in zip(spans, origins, unbounded, strict=True):
        if each:
            first = start // span.shape.tokens
            known = sum(1 for _ in takewhile(lambda at: at != NOWHERE, column[first:]))
            end = min(end, (first + known) * span.shape.tokens)
    end = end // step * step
    _, places = needed(spans, origins, start, end)
    return end if NOWHERE in places else 0


def whole(spans: Sequence[Span]) -> int:
    """Where a prompt's last whole chunks end: its windows and states are kept there."""
    step = max(span.shape.tokens for span in spans)
    return min(len(span.keys) * span.shape.tokens for span in spans) // step * step


def windowed(spans: Sequence[Span]) -> list[Span]:
    """Those that keep less than the whole prompt."""
    return [span for span in spans if span.shape.window is not None]


def kept_within(spans: Sequence[Span], origins: Sequence[Sequence[int]], stop: int) -> int:
    """The last token up to `stop` at which these windows are kept, so that a hit could end there;
    0 if there is none."""
    step = max(span.shape.tokens for span in spans)
    for end in range(min(stop, whole(spans)) // step * step, 0, -step):
        _, places = needed(spans, origins, 0, end)
        if NOWHERE not in places and COMING not in places:
            return end
    return 0


def woven(spans: Sequence[Span], ends: Collection[int]) -> list[BlockKey]:
    """A prompt's keys as one prefix: all groups in turn, token by token, and of windows what hits
    take that end at one of `ends`.

    None of a prompt's groups is of use without the others: used and evicted as one prefix, tail
    first, they stay and go together.
    """
    grown: list[tuple[int, bool, BlockKey]] = []
    for span in spans:
        tokens, window, _ = span.shape
        chunks: Iterable[int] = range(len(span.keys))
        if window is not None:
            chunks = {at for end in ends for at in span.needed(0, end) if at < len(span.keys)}
        grown += [((at + 1) * tokens, window is not None, span.keys[at]) for at in chunks]
    grown.sort()
    return [key for _, _, key in grown]


OFFERS_MAX = 32
"""How finely the cost model looks at a long prompt."""


class HitRoom(NamedTuple):
    """What host memory and the mover can take in."""

    slots: int
    promised: Container[BlockKey]
    """Keys whose slots are taken off `slots` already."""
    slotless: Container[int]
    """Tiers whose blocks do not come through host memory."""
    queues: Mapping[int, int]
    """How many more blocks of each lower tier may be under way."""

    def takes(self, key: BlockKey, origin: int) -> bool:
        """Whether a block needs one more slot, be it the one that it lies in."""
        return origin >= HOST and origin not in self.slotless and key not in self.promised


def stops(
    spans: Sequence[Span],
    origins: Sequence[Sequence[int]],
    start: int,
    limit: int,
    room: HitRoom,
) -> tuple[list[int], bool]:
    """Where a hit that begins at `start` may end: at `limit` tokens at most, with all that it needs
    at hand, and with room for it. And whether with more room it could reach further."""
    step = max(span.shape.tokens for span in spans)
    end = last_stop(spans, limit)
    missing = [_sums(at < HOST and at != JOINING for at in column) for column in origins]
    taking = [
        _sums(map(room.takes, span.keys, column))
        for span, column in zip(spans, origins, strict=True)
    ]
    queued = [
        (most, [_sums(takes) for takes in _from(tier, spans, origins, room)])
        for tier, most in room.queues.items()
        if any(tier in column for column in origins)
    ]
    found: list[int] = []
    for stop in range(start // step * step + step, end + 1, step):
        ranges = [span.needed(start, stop) for span in spans]
        if _count(missing, ranges) == 0:
            queue_full = any(_count(sums, ranges) > most for most, sums in queued)
            if queue_full or _count(taking, ranges) > room.slots:
                return found, True
            found.append(stop)
    return found, False


def _from(
    tier: int, spans: Sequence[Span], origins: Sequence[Sequence[int]], room: HitRoom
) -> Iterable[list[bool]]:
    """Group by group, which blocks would have to be moved in from a tier."""
    for span, column in zip(spans, origins, strict=True):
        yield [
            at == tier and room.takes(key, at) for key, at in zip(span.keys, column, strict=True)
        ]


def skip_blocks(runs: Sequence[LoadRun], count: int) -> list[LoadRun]:
    """What is left of a prefix behind so many blocks."""
    left = []
    for link, blocks, size in runs:
        skipped = min(count, blocks)
        count -= skipped
        if skipped < blocks:
            left.append(LoadRun(link, blocks - skipped, size - size * skipped // blocks))
    return left


def thin(values: list[int]) -> list[int]:
    """At most `OFFERS_MAX` of them, evenly spread, the last among them."""
    if len(values) <= OFFERS_MAX:
        return values
    return [values[(at + 1) * len(values) // OFFERS_MAX - 1] for at in range(OFFERS_MAX)]


def offers(
    spans: Sequence[Span],
    places: Sequence[Sequence[int]],
    names: Sequence[str],
    start: int,
    found: Sequence[int],
) -> list[Offer]:
    """What a hit takes that ends at each of these stops, link by link; `names` has each tier's."""
    by_link = [_by_link(column, names) for column in places]
    made = []
    for stop in found:
        blocks: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for span, column in zip(spans, by_link, strict=True):
            chunks = span.needed(start, stop)
            for link, sums in column.items():
                count = sums[chunks.stop] - sums[chunks.start]
                if count:
                    blocks[link] = blocks.get(link, 0) + count
                    sizes[link] = sizes.get(link, 0) + count * span.bytes
        made.append(Offer(stop, [LoadRun(link, blocks[link], sizes[link]) for link in blocks]))
    return made


def _by_link(column: Sequence[int], names: Sequence[str]) -> Mapping[str, list[int]]:
    """For every link, how many of the first so many chunks would cross it."""
    links = {origin: names[origin] if origin > HOST else DEVICE for origin in set(column)}
    return {
        link: _sums(links[at] == link for at in column)
        for link in dict.fromkeys(links[at] for at in links if at >= HOST)
    }


def _sums(values: Iterable[bool]) -> list[int]:
    return list(accumulate(values, initial=0))


def _count(sums: Sequence[list[int]], ranges: Sequence[range]) -> int:
    return sum(
        each[where.stop] - each[where.start] for each, where in zip(sums, ranges, strict=True)
    )


class Decision:
    """How much of a request's hit is taken. It holds as long as the question stays the same: a
    request that waits is asked about in every step, but decided, and counted, once."""

    __slots__ = ("answer", "at_hand", "missed", "question", "short_of_room", "stops", "weighed")

    def __init__(self, at_hand: bool = False) -> None:
        self.at_hand = at_hand
        """Only what need not be waited for is taken, and nobody counts what is looked for: that was
        done before, and did not come in time."""
        self.question: object = None
        self.missed: list[int] = []
        """How many blocks each tier was counted to miss: they come and go while a request waits."""
        self.answer = 0
        self.stops: list[int] = []
        self.weighed: tuple[float, float] | None = None
        """If a part of the hit is not taken, how many seconds its load was expected to take, and
        computing it."""
        self.short_of_room = False
        """Host memory had no room for more, and may have it now."""


class HitPlanner:
    """Decides how much of a hit to take, and counts what was looked for."""

    def __init__(
        self,
        counters: ChainCounters,
        costs: CostModel | None,
        joinable: Mapping[BlockKey, Move],
        clock: Callable[[], float],
    ) -> None:
        self._counters = counters
        self._costs = costs
        self._joinable = joinable
        self._clock = clock

    def prefix(
        self,
        keys: Sequence[BlockKey],
        origins: Sequence[int],
        tokens_per_block: int,
        start: int,
        decision: Decision,
    ) -> int:
        """How many leading blocks of a prefix to take."""
        places = self._nearly(keys, origins, decision)
        runs = plan_runs(places, self._counters.links, self._counters.sizes(keys))
        question = (start, len(keys), runs)
        if decision.question != question:
            decision.question = question
            if not decision.at_hand:
                decision.missed = self._counters.looked_up(origins, decision.missed)
            decision.answer = sum(run.blocks for run in runs)
            decision.weighed = None
            if runs and self._costs is not None:
                there = decision.answer
                decision.answer = self._costs.admit(runs, tokens_per_block, start)
                if decision.answer < there:
                    rest = skip_blocks(runs, decision.answer)
                    first = start + decision.answer * tokens_per_block
                    last = start + there * tokens_per_block
                    decision.weighed = self._costs.weigh(rest, first, last)
        return decision.answer

    def furthest(
        self,
        spans: Sequence[Span],
        origins: Sequence[Sequence[int]],
        start: int,
        limit: int,
        room: HitRoom,
        decision: Decision,
    ) -> int:
        """Up to which token to take the hit of a request with several groups, or with windows."""
        places = [
            self._nearly(span.keys, column, decision)
            for span, column in zip(spans, origins, strict=True)
        ]
        question = (start, limit, places)
        same = decision.question == question
        if same and not decision.short_of_room:
            return decision.answer
        if not same:
            decision.question = question
            if not decision.at_hand:
                begun = zip((start // span.shape.tokens for span in spans), origins, strict=True)
                sought = [at for first, column in begun for at in column[first:]]
                decision.missed = self._counters.looked_up(sought, decision.missed)
        found, decision.short_of_room = stops(spans, origins, start, limit, room)
        if not same or found != decision.stops:
            decision.stops = found
            decision.answer = self._choose(spans, places, start, thin(found), decision)
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
        self,
        spans: Sequence[Span],
        places: list[Sequence[int]],
        start: int,
        found: list[int],
        decision: Decision,
    ) -> int:
        best = len(found) - 1
        decision.weighed = None
        if self._costs is not None:
            made = offers(spans, places, self._counters.links, start, found)
            best = self._costs.choose(made, start)
            if best < len(found) - 1:
                known = found[best] if best >= 0 else start
                decision.weighed = self._costs.weigh(made[-1].loads, known, found[-1])
        return found[best] if best >= 0 else start
