"""How far hits over several cache groups reach, beside a slow way to say the same."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.chain.hits import (
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
    whole,
    windowed,
    woven,
)
from kvtier.chain.plan import COMING, HOST, JOINING, NOWHERE
from kvtier.chain.stats import ChainCounters
from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE, Offer
from kvtier.testing.subject import NAMESPACE, make_keys

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
