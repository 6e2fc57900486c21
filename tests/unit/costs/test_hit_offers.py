"""Hits over several cache groups: how far they may reach, and how far it is worth going."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.tiers.chains import ChainRig, rule

from kvtier.chain.hits import (
    OFFERS_MAX,
    Decision,
    HitPlanner,
    HitRoom,
    Shape,
    Span,
    asked,
    columns,
    junction,
    kept_within,
    needed,
    offers,
    stops,
    thin,
    whole,
    windowed,
    woven,
)
from kvtier.chain.plan import COMING, HOST, JOINING, NOWHERE
from kvtier.chain.stats import ChainCounters
from kvtier.cost.model import CostModel, Prior
from kvtier.cost.rates import DEVICE, LoadRun, Offer
from kvtier.settings import WritePolicy
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

CHUNK = 256
FULL, WINDOW, STATE = Shape(CHUNK), Shape(CHUNK, 2), Shape(CHUNK, 1, recurrent=True)
PLENTY = HitRoom(1000, (), (), {})
MEDIA = ["cpu", "disk"]
LAST = 8


def spans(*shapes: Shape, chunks: int = LAST, size: int = 1 << 20) -> list[Span]:
    return [
        Span(shape, make_keys(chunks, start=100 * group), size)
        for group, shape in enumerate(shapes)
    ]


def test_long_prompts_are_looked_at_coarsely() -> None:
    assert thin([1, 2, 3]) == [1, 2, 3]
    few = thin(list(range(1000)))
    assert len(few) == OFFERS_MAX
    assert (few[0], few[-1]) == (30, 999)


# -- what it is worth: a disk as fast as it may be, and an engine of 1000 tokens a second

TOKENS_A_SECOND = 1000.0


def appraiser(*, disk: float) -> tuple[HitPlanner, CostModel]:
    costs = CostModel(priors={"disk": Prior(0.001, disk)}, clock=lambda: 0.0)
    costs.observe_prefill(1000, 1000 / TOKENS_A_SECOND)
    return HitPlanner(ChainCounters(MEDIA, NAMESPACE), costs, {}, time.monotonic), costs


def worth(of: HitPlanner, groups: Sequence[Span], places: list[list[int]]) -> int:
    return of.furthest(groups, places, 0, 1 << 20, PLENTY, Decision()) // CHUNK


@pytest.mark.parametrize("shapes", [(FULL, WINDOW), (FULL, STATE), (WINDOW,), (FULL, FULL)])
def test_a_fast_disk_is_taken_and_a_slow_one_is_not(shapes: tuple[Shape, ...]) -> None:
    groups = spans(*shapes)
    places = [[1] * LAST for _ in shapes]
    fast, _ = appraiser(disk=1e9)
    assert worth(fast, groups, places) == LAST
    slow, costs = appraiser(disk=1e5)
    taken = [worth(slow, groups, places) for _ in range(50)]
    assert taken[1:] == [0] * 49, "but for one probe"
    assert costs.stats()["disk"].probes <= 1
    assert costs.stats()["disk"].refusing


class Disk(NamedTuple):
    """A disk and an engine, as they are for a while."""

    latency: float
    bandwidth: float
    tokens_a_second: float

    def loading(self, chunks: int) -> float:
        """Seconds for a hit of so many chunks, and a window of two at its end."""
        return self.latency + moved(chunks) / self.bandwidth if chunks else 0.0

    def computing(self, chunks: int) -> float:
        return (chunks * CHUNK + 512) / self.tokens_a_second


def moved(chunks: int) -> int:
    return (chunks + min(chunks, 2)) << 22


def loss(seed: int) -> float:
    """What 2000 requests of a model with windows lose, whose disk and engine change every 200,
    against somebody who knows both at every moment."""
    rng, now = random.Random(seed), [0.0]
    costs = CostModel(clock=lambda: now[0])
    of = HitPlanner(ChainCounters(MEDIA, NAMESPACE), costs, {}, time.monotonic)
    longest = spans(FULL, WINDOW, chunks=50, size=1 << 22)
    spent = best = 0.0
    disk = Disk(0.01, 1e9, 10_000)
    for number in range(2000):
        if number % 200 == 0:
            speeds = [rng.uniform(*each) for each in ((-3, 0), (7.5, 9.5), (3.5, 4.5))]
            disk = Disk(*(10**each for each in speeds))
        chunks = rng.randrange(2, 50)
        groups = [span._replace(keys=span.keys[:chunks]) for span in longest]
        taken = worth(of, groups, [[1] * chunks] * 2)
        seconds = disk.loading(taken) + disk.computing(chunks - taken)
        spent += seconds
        best += min(disk.loading(at) + disk.computing(chunks - at) for at in range(chunks + 1))
        if taken:
            costs.observe_load("disk", moved(taken), disk.loading(taken))
            costs.observe_load(DEVICE, moved(taken), moved(taken) / 10e9)
        now[0] += seconds + rng.expovariate(1.0)
        costs.observe_prefill((chunks - taken) * CHUNK + 512, disk.computing(chunks - taken))
    return spent / best - 1


@pytest.mark.slow
def test_the_loss_against_one_who_knows_is_bounded() -> None:
    lost = [loss(seed) for seed in range(8)]
    assert sum(lost) / len(lost) < 0.10
    assert max(lost) < 0.25


def test_no_offers_are_nothing() -> None:
    _, costs = appraiser(disk=1e9)
    assert costs.choose([], 0) == -1
    assert CostModel().choose([Offer(CHUNK, [LoadRun("disk", 1, 1)])], 0) == 0, (
        "nothing is known yet"
    )


# -- through a chain


@pytest.fixture
def rig() -> ChainRig:
    return ChainRig([8, 32], [rule(), rule(WritePolicy.NEVER)])


def grouped(rig: ChainRig, chunks: int, first: int = 0) -> list[Span]:
    """A prompt whose chunks of two groups lie on the disk."""
    keys: list[list[BlockKey]] = [
        rig.put(1, make_keys(chunks, start=first, group=group)) for group in range(2)
    ]
    return [
        Span(shape, mine, NAMESPACE.payload_bytes)
        for shape, mine in zip((FULL, WINDOW), keys, strict=True)
    ]


def test_a_chain_promises_what_will_be_loaded_and_no_more(rig: ChainRig) -> None:
    one, two = grouped(rig, 4), grouped(rig, 4, first=10)
    stop, places = rig.chain.match_windows(one, 0, 4 * CHUNK, Decision())
    assert (stop, places) == (4 * CHUNK, [[1] * 4] * 2)
    assert rig.chain.match_windows(two, 0, 4 * CHUNK, Decision())[0] == CHUNK, (
        "two of eight slots are left"
    )
    keys = [*one[0].keys, *one[1].keys[2:]]
    assert rig.chain.begin_load(keys, "a", 1e9).missing == []
    assert rig.chain.begin_load([two[0].keys[0], two[1].keys[0]], "b", 1e9).missing == []


def test_a_request_that_waits_is_counted_once(rig: ChainRig) -> None:
    costs = CostModel(clock=lambda: rig.now)
    costs.observe_prefill(1024, 100.0)
    rig = ChainRig([8, 32], [rule(), rule(WritePolicy.NEVER)], costs=costs, clock=lambda: 0.0)
    groups, decision, alone = grouped(rig, 4), Decision(), Decision()
    for _ in range(5):
        assert rig.chain.match_windows(groups, 0, 4 * CHUNK, decision)[0] == 4 * CHUNK
        assert rig.chain.match_prefix(groups[0].keys, CHUNK, 0, alone) == 4
        rig.chain.poll()
    link = costs.stats()[rig.tiers[1].medium]
    assert (link.taken, link.refused, link.probes) == (6 + 4, 0, 0)
    assert rig.chain.chain_stats().misses == [8 + 4, 0]


@pytest.mark.parametrize("ask", ["worth", "reach"])
def test_a_request_that_waits_while_its_blocks_come_and_go_misses_each_once(ask: str) -> None:
    rig, keys, decision = ChainRig([8]), make_keys(6), Decision()
    rig.put(0, keys[:4])
    for left in (4, 4, 3, 2, 3, 1):
        rig.tiers[0].forget(keys[left:4])
        rig.put(0, keys[:left])
        if ask == "worth":
            assert rig.chain.match_prefix(keys, CHUNK, 0, decision) == left
        else:
            rig.chain.match_windows([Span(FULL, keys, 1)], 0, 6 * CHUNK, decision)
        rig.chain.poll()
    assert rig.chain.chain_stats().misses == [5], "no more than it has asked for"


def test_more_room_is_noticed_while_a_request_waits(rig: ChainRig) -> None:
    groups, decision = grouped(rig, 4), Decision()
    held = rig.chain.begin_load(rig.put(0, make_keys(5, start=50)), "other", 1e9)
    assert rig.chain.match_windows(groups, 0, 4 * CHUNK, decision)[0] == CHUNK
    rig.chain.end_load(held)
    rig.chain.poll()
    assert rig.chain.match_windows(groups, 0, 4 * CHUNK, decision)[0] == 4 * CHUNK


def test_what_has_just_begun_to_load_takes_nobody_elses_place() -> None:
    """Of twelve blocks that may be under way two are left, in the step in which ten have begun."""
    rules = [rule(), rule(WritePolicy.NEVER, queue_blocks=12)]
    rig = ChainRig([64, 64], rules)
    rig.chain.begin_load(rig.put(1, make_keys(6, start=50)), "before", 1e9)
    rig.chain.poll()
    one, two = grouped(rig, 2), grouped(rig, 2, first=10)
    rig.put(0, [span.keys[0] for span in two])
    assert rig.chain.match_windows(one, 0, 2 * CHUNK, Decision())[0] == 2 * CHUNK
    assert rig.chain.begin_load([key for span in one for key in span.keys], "a", 1e9).missing == []
    assert rig.chain.match_windows(two, 0, 2 * CHUNK, Decision())[0] == 2 * CHUNK


# -- how far hits over several cache groups reach, beside a slow way to say the same


STEP = 4
NAMES = ["cpu", "disk", "bucket"]
places = st.sampled_from([HOST, 1, 1, 1, 2, JOINING, NOWHERE, COMING])
shapes = st.builds(
    lambda tokens, window, recurrent: Shape(tokens, 1 if recurrent else window, recurrent),
    st.sampled_from([STEP, STEP, STEP // 2]),
    st.sampled_from([None, 1, 2, 3]),
    st.booleans(),
)


class Case(NamedTuple):
    spans: list[Span]
    columns: list[list[int]]
    start: int
    limit: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.integers(STEP, 40))
    kinds = draw(st.lists(shapes, min_size=1, max_size=3))
    kinds[0] = kinds[0]._replace(tokens=STEP)
    spans, found = [], []
    for group, shape in enumerate(kinds):
        count = max(1, tokens // shape.tokens - draw(st.sampled_from([0, 0, 0, 1])))
        spans.append(Span(shape, make_keys(count, start=100 * group), 10 + group))
        good = draw(st.sampled_from([places, st.sampled_from([HOST, 1, JOINING])]))
        found.append(draw(st.lists(good, min_size=count, max_size=count)))
    start = draw(st.integers(0, tokens))
    return Case(spans, found, start, draw(st.integers(start, tokens + 1)))


def takes(span: Span, start: int, stop: int) -> list[int]:
    """The chunks with tokens of `start:stop`: of a window, those of them among its last ones."""
    tokens, window, _ = span.shape
    last = max((at for at in range(len(span.keys) + 1) if at * tokens < stop), default=-1)
    least = 0 if window is None else last + 1 - window
    return [at for at in range(last + 1) if (at + 1) * tokens > start and at >= least]


def there(case: Case, start: int, stop: int) -> list[tuple[Any, int, int]]:
    """Key, place and size of all that a hit takes."""
    return [
        (span.keys[at], column[at], span.bytes)
        for span, column in zip(case.spans, case.columns, strict=True)
        for at in takes(span, start, stop)
    ]


def prompt_end(spans: Sequence[Span]) -> int:
    return min(len(span.keys) * span.shape.tokens // STEP * STEP for span in spans)


def ends(case: Case, start: int, limit: int) -> list[int]:
    most = min(limit, prompt_end(case.spans))
    return [stop for stop in range(STEP, most + 1, STEP) if stop > start]


@given(
    cases(),
    st.integers(0, 12),
    st.sets(st.integers(0, 30)),
    st.sets(st.sampled_from([1, 2])),
    st.dictionaries(st.sampled_from([1, 2]), st.integers(0, 5)),
)
def test_where_hits_may_end(
    case: Case, slots: int, promised: set[int], slotless: set[int], queues: dict[int, int]
) -> None:
    every = [key for span in case.spans for key in span.keys]
    room = HitRoom(slots, {every[at] for at in promised if at < len(every)}, slotless, queues)
    limit = case.limit - any(span.shape.recurrent for span in case.spans)
    found, cramped = [], False
    for stop in ends(case, case.start, limit):
        loads = there(case, case.start, stop)
        if any(at in (NOWHERE, COMING) for _, at, _ in loads):
            continue
        wanted = [
            at
            for key, at, _ in loads
            if at >= HOST and at not in slotless and key not in room.promised
        ]
        tiers = Counter(wanted)
        if len(wanted) > slots or any(tiers[tier] > most for tier, most in queues.items()):
            cramped = True
            break
        found.append(stop)
    assert stops(case.spans, case.columns, case.start, case.limit, room) == (found, cramped)


@given(cases())
def test_what_a_hit_takes(case: Case) -> None:
    for stop in ends(case, case.start, 40):
        keys, at = needed(case.spans, case.columns, case.start, stop)
        assert list(zip(keys, at, strict=True)) == [
            (key, place) for key, place, _ in there(case, case.start, stop)
        ]
    assert needed(case.spans, case.columns, case.start, case.start) == ([], [])


@given(cases())
def test_what_is_asked_for_and_where_the_answers_go(case: Case) -> None:
    wanted = [
        (key, place)
        for span, column in zip(case.spans, case.columns, strict=True)
        for at, (key, place) in enumerate(zip(span.keys, column, strict=True))
        if (at + 1) * span.shape.tokens > case.start
    ]
    assert asked(case.spans, case.start) == [key for key, _ in wanted]
    known = columns(case.spans, case.start, [place for _, place in wanted])
    for span, column, answer in zip(case.spans, case.columns, known, strict=True):
        before = case.start // span.shape.tokens
        assert answer == [NOWHERE] * before + column[before:]


@given(cases())
def test_what_an_offer_loads(case: Case) -> None:
    """Of what is on its way into host memory, only the way from there."""
    found, _ = stops(case.spans, case.columns, case.start, 40, HitRoom(1000, (), (), {}))
    own = [[HOST if place == JOINING else place for place in column] for column in case.columns]
    for offer in offers(case.spans, own, NAMES, case.start, found.copy()):
        blocks, size = Counter[str](), Counter[str]()
        for _, place, each in there(case, case.start, offer.stop):
            link = DEVICE if place in (HOST, JOINING) else NAMES[place]
            blocks[link] += 1
            size[link] += each
        assert {run.link: run.blocks for run in offer.loads} == blocks
        assert {run.link: run.bytes for run in offer.loads} == size
        found.remove(offer.stop)
    assert found == []


@given(cases(), st.integers(0, 41))
def test_where_windows_are_kept(case: Case, stop: int) -> None:
    mine = windowed(case.spans)
    assert mine == [span for span in case.spans if span.shape.window]
    kept = [
        end
        for end in ends(case, 0, stop)
        if not {NOWHERE, COMING} & {place for _, place, _ in there(case, 0, end)}
    ]
    assert kept_within(case.spans, case.columns, stop) == max(kept, default=0)
    assert whole(case.spans) == prompt_end(case.spans)


@given(cases(), st.sets(st.integers(1, 10)))
def test_a_prompt_as_one_prefix(case: Case, steps: set[int]) -> None:
    some = {step * STEP for step in steps if step * STEP <= prompt_end(case.spans)}
    order: list[tuple[int, bool, Any]] = []
    for span in case.spans:
        window = span.shape.window is not None
        for at, key in enumerate(span.keys):
            if not window or any(at in takes(span, 0, end) for end in some):
                order.append(((at + 1) * span.shape.tokens, window, key))
    assert woven(case.spans, some) == [key for _, _, key in sorted(order)]


FEWER_STATES_THAN_CHUNKS = Case(
    [
        Span(Shape(STEP, 1, True), make_keys(2), 10),
        Span(Shape(STEP, None), make_keys(3, start=100), 11),
    ],
    [[HOST, NOWHERE], [HOST, HOST, HOST]],
    start=0,
    limit=3 * STEP + 1,
)


@given(cases())
@example(FEWER_STATES_THAN_CHUNKS)
def test_where_prompts_part(case: Case) -> None:
    """As far as all groups that keep the whole prompt have it; nowhere if a hit can end there."""
    full = [
        (span, column)
        for span, column in zip(case.spans, case.columns, strict=True)
        if span.shape.window is None
    ]
    best = 0
    if 0 < len(full) < len(case.spans):
        known = [
            stop
            for stop in ends(case, case.start, case.limit - 1)
            if all(
                NOWHERE not in [column[at] for at in takes(span, case.start, stop)]
                for span, column in full
            )
        ]
        end = max(known, default=0)
        if NOWHERE in [place for _, place, _ in there(case, case.start, end)]:
            best = end
    assert junction(case.spans, case.columns, case.start, case.limit) == best


class Counted(CostModel):
    """Takes all, and counts how often it was asked."""

    asked = 0

    def choose(self, offers: Sequence[Offer], start: int) -> int:
        self.asked += 1
        return len(offers) - 1


@pytest.mark.parametrize("change", ["nothing", "places", "start", "limit", "room"])
def test_a_decision_holds_while_the_question_is_the_same(change: str) -> None:
    costs = Counted()
    tally = ChainCounters(NAMES, NAMESPACE)
    appraiser, decision = HitPlanner(tally, costs, {}, time.monotonic), Decision()
    spans = [Span(Shape(STEP), make_keys(6), 10)]
    question: dict[str, Any] = {"start": 0, "limit": 24, "places": [1] * 6, "room": 4}

    def ask() -> int:
        room = HitRoom(question["room"], (), (), {})
        args = question["start"], question["limit"], room, decision
        return appraiser.furthest(spans, [question["places"]], *args) // STEP

    assert ask() == 4
    assert decision.short_of_room
    missed = tally.misses.copy()
    assert ask() == 4
    assert costs.asked == 1, "cramped, and there is no more room yet"
    assert tally.misses == missed, "looked for once"
    question |= {
        "nothing": {},
        "places": {"places": [1, 1, 1, NOWHERE, 1, 1]},
        "start": {"start": STEP},
        "limit": {"limit": 3 * STEP},
        "room": {"room": 6},
    }[change]
    answer, times = {
        "nothing": (4, 1),
        "places": (3, 2),
        "start": (5, 2),
        "limit": (3, 2),
        "room": (6, 2),
    }[change]
    assert (ask(), costs.asked) == (answer, times)
    assert (ask(), costs.asked) == (answer, times)
