"""Prompts that another engine has computed: which of its blocks are waited for, and how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scheduler.asking import (
    CHUNK,
    FULL,
    SLOT,
    STATE,
    TWO_GROUPS,
    WINDOW,
    Asking,
    costs_of,
    manager,
    small_above_large,
    stored,
)

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.settings import ByteSize
from kvtier.vllm.deferrals import WAIT_S, handover_answer, is_handed_over
from kvtier.vllm.protocol import Report

SHAPES = [(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, STATE), (WINDOW, STATE)]
TOKENS = 8 * CHUNK + 1
COMPUTING = 8 * CHUNK / 1024
"""Seconds for all of it; 0.25 for a chunk."""


def test_what_one_engine_answers_the_other_understands() -> None:
    """In the words of vLLM's connectors; whatever else a client may have sent is none of it."""
    told = handover_answer({"do_remote_decode": True, "do_remote_prefill": False})
    assert told == {"do_remote_prefill": True, "do_remote_decode": False}
    assert is_handed_over(told)
    assert handover_answer(told) is None
    words: list[object] = [None, 5, "do_remote_decode", ["do_remote_prefill"]]
    for said in (*words, {}, {1: 2}, {"do_remote_prefill": "yes"}, {"do_remote_prefill": 1}):
        assert handover_answer(said) is None
        assert not is_handed_over(said)


class Answering:
    """An engine by a clock of its own, whose disk is another's, too."""

    def __init__(self, stack: Stack, shapes: tuple[Shape, ...], *, known: bool = True) -> None:
        self.now = [0.0]
        costs = costs_of(self.now, known=known)
        self.asking: Asking = manager(stack, *shapes, costs=costs, clock=lambda: self.now[0])
        self.made = self.asking.manager

    def waits(self, request: str, ends: dict[bytes, int], tokens: int = TOKENS) -> bool:
        """As the connector asks: in short first, whether nothing has changed."""
        self.made.begin_lookup(request, 0, tokens)
        return self.made.still_deferred(request, ends) or None in self.asking.answers(
            request, ends, tokens
        )

    def comes(self, request: str) -> None:
        """A request, by way of an engine that has computed its prompt."""
        self.made.on_new_request(request)
        self.made.expect(request)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Stack]:
    tiers = small_above_large(tmp_path)
    tiers["tiers"][0]["capacity"] = str(ByteSize(64 * SLOT))
    with Stack.open(tiers, TWO_GROUPS) as stack:
        yield stack


@pytest.mark.parametrize("shapes", SHAPES)
def test_it_waits_until_all_has_come_that_a_hit_takes(
    disk: Stack, shapes: tuple[Shape, ...]
) -> None:
    engine = Answering(disk, shapes)
    ends = engine.asking.keys(8)
    engine.comes("a")
    engine.made.on_new_request("plain")
    *needed, last = engine.asking.needed(ends)
    assert engine.waits("a", ends)
    stored(disk, {key: ends[key] for key in needed})
    assert engine.waits("a", ends), "one is missing"
    assert not engine.waits("plain", ends)
    stored(disk, {last: ends[last]})
    assert not engine.waits("a", ends)
    assert engine.asking.hit("a", ends, TOKENS) == 8 * CHUNK


@pytest.mark.parametrize("known", [True, False])
def test_it_waits_no_longer_than_computing_takes(disk: Stack, known: bool) -> None:
    """And half as long after each time in vain, until something comes."""
    engine = Answering(disk, (FULL,), known=known)
    patience = COMPUTING if known else WAIT_S
    for number, share in enumerate((1.0, 0.5, 0.25, 0.125, 0.125)):
        ends, name = engine.asking.keys(8, first=100 * number), f"in vain {number}"
        engine.comes(name)
        assert engine.waits(name, ends)
        engine.now[0] += share * patience - 0.01
        assert engine.waits(name, ends)
        engine.now[0] += 0.02
        assert not engine.waits(name, ends)
        assert not engine.waits(name, ends), "for good"
    there, not_there = engine.asking.keys(8, first=1000), engine.asking.keys(8, first=2000)
    engine.comes("there")
    stored(disk, there)
    assert not engine.waits("there", there)
    engine.comes("again")
    engine.now[0] += patience - 0.01
    assert engine.waits("again", not_there), "since things come"


def test_what_takes_longer_than_short_waits_is_found_again(disk: Stack) -> None:
    """By a bucket blocks may come after more than half the time that computing takes, each time:
    to wait ever shorter for them would be to find them never again."""
    engine = Answering(disk, (FULL,))

    def found(number: int, after: float) -> bool:
        ends = engine.asking.keys(8, first=100 * number)
        engine.comes(name := str(number))
        begun, came = engine.now[0], False
        while engine.waits(name, ends):
            engine.now[0] += COMPUTING / 100
            if not came and engine.now[0] - begun >= after * COMPUTING:
                came = True
                stored(disk, ends)
        waited, engine.now[0] = engine.now[0] - begun, engine.now[0] + COMPUTING
        assert waited < 1.02 * COMPUTING
        return came

    assert not any(found(number, after=1.5) for number in range(10)), "nothing comes in time"
    first = next(number for number in range(10, 100) if found(number, after=0.6))
    assert first < 10 + 32, "computing takes about as long as one of them does"
    assert all(found(number, after=0.6) for number in range(100, 105))


def test_waits_in_full_for_nothing_become_rare(disk: Stack) -> None:
    engine = Answering(disk, (FULL,))
    waited = []
    for number in range(100):
        ends = engine.asking.keys(8, first=100 * number)
        engine.comes(name := str(number))
        begun = engine.now[0]
        while engine.waits(name, ends):
            engine.now[0] += COMPUTING / 64
        waited.append((engine.now[0] - begun) / COMPUTING)
        engine.now[0] += COMPUTING
    full = [number for number, share in enumerate(waited) if share > 0.9]
    assert len(full) < 10
    assert max(waited) < 1.05
    assert sum(waited[50:]) / 50 < 0.2


def test_that_nothing_comes_is_not_said_of_every_request(
    disk: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """Where two engines share nothing, by mistake, each request would be a line in the log."""
    caplog.set_level("INFO", "kvtier.vllm.deferrals")
    engine = Answering(disk, (FULL,))

    def in_vain(number: int) -> int:
        for name in map(str, range(number, number + 20)):
            ends = engine.asking.keys(8, first=100 * int(name))
            engine.comes(name)
            assert engine.waits(name, ends)
            engine.now[0] += COMPUTING
            assert not engine.waits(name, ends)
        return len(caplog.messages)

    assert in_vain(0) == 3
    there = engine.asking.keys(8, first=10_000)
    engine.comes("there")
    stored(disk, there)
    assert not engine.waits("there", there)
    assert in_vain(20) == 6, "that one came, and the next do not, is news"


@pytest.mark.parametrize("shapes", SHAPES)
def test_what_is_there_need_not_be_computed(disk: Stack, shapes: tuple[Shape, ...]) -> None:
    """All but the end of a long prompt: it is waited for as long as that takes to compute."""
    engine = Answering(disk, shapes)
    ends = engine.asking.keys(24)
    stored(disk, ends, but=1)
    engine.comes("a")
    tokens = 24 * CHUNK + 1
    assert engine.waits("a", ends, tokens)
    engine.now[0] += CHUNK / 1024 - 0.01
    assert engine.waits("a", ends, tokens)
    engine.now[0] += 0.02
    assert not engine.waits("a", ends, tokens)


def test_time_runs_from_when_it_came(disk: Stack) -> None:
    """Not from when the engine first has room for it."""
    engine = Answering(disk, (FULL,))
    engine.comes("a")
    engine.now[0] += COMPUTING + 0.01
    assert not engine.waits("a", engine.asking.keys(8))


def test_what_it_has_computed_itself_it_expects_of_nobody(disk: Stack) -> None:
    """It was scheduled at once, and preempted later."""
    engine = Answering(disk, (FULL,))
    engine.comes("a")
    engine.made.scheduled("a")
    assert not engine.waits("a", engine.asking.keys(8))


def test_nothing_is_looked_up_while_nothing_comes(disk: Stack) -> None:
    engine = Answering(disk, (FULL,))
    ends = engine.asking.keys(8)
    engine.comes("a")
    assert not engine.made.still_deferred("a", ends), "it has not been told to"
    assert engine.waits("a", ends)
    *needed, last = ends
    assert engine.made.still_deferred("a", ends)
    stored(disk, {key: ends[key] for key in needed})
    assert engine.made.still_deferred("a", ends), "the last one has not come"
    stored(disk, {last: ends[last]})
    assert not engine.made.still_deferred("a", ends)
    assert not engine.waits("a", ends)


def test_all_may_have_come_while_others_load(disk: Stack) -> None:
    """It has waited for blocks, and not for the room that these hold."""
    engine = Answering(disk, (FULL,))
    others, ends = engine.asking.keys(8, first=100), engine.asking.keys(8)
    stored(disk, others)
    assert engine.asking.hit("other", others, TOKENS) == 8 * CHUNK
    engine.made.prepare_load(list(others), "other")
    engine.comes("a")
    assert engine.waits("a", ends)
    stored(disk, ends)
    assert not engine.made.still_deferred("a", ends)
    assert engine.asking.hit("a", ends, TOKENS) == 8 * CHUNK


def test_what_is_being_stored_here_has_not_come_yet(disk: Stack) -> None:
    engine = Answering(disk, (FULL,))
    ends = engine.asking.keys(8)
    engine.made.on_new_request("first")
    taken, worker_job = engine.made.prepare_store(list(ends), "first")
    assert taken == list(ends)
    engine.comes("a")
    assert engine.waits("a", ends)
    assert engine.made.still_deferred("a", ends)
    engine.made.report(worker_job.number, Report(ranks=1))
    assert not engine.waits("a", ends)
    assert engine.asking.hit("a", ends, TOKENS) == 8 * CHUNK


@pytest.mark.parametrize(
    ("shapes", "kept"), [((FULL,), 8), ((FULL, WINDOW), 7), ((FULL, STATE), 7)]
)
def test_a_prompt_that_ends_with_a_block(disk: Stack, shapes: tuple[Shape, ...], kept: int) -> None:
    """Of models with windows the other engine keeps what the prompt's last token is computed with,
    which is the end of the block before."""
    engine = Answering(disk, shapes)
    ends = engine.asking.keys(8)
    engine.comes("a")
    assert engine.waits("a", ends, 8 * CHUNK)
    there = engine.asking.needed({key: end for key, end in ends.items() if end <= kept * CHUNK})
    *most, last = sorted(there, key=ends.__getitem__)
    stored(disk, {key: ends[key] for key in most})
    assert engine.waits("a", ends, 8 * CHUNK)
    stored(disk, {last: ends[last]})
    assert not engine.waits("a", ends, 8 * CHUNK)


def test_after_a_reset_engines_find_nothing_of_each_other(disk: Stack) -> None:
    engine = Answering(disk, (FULL,))
    ends = engine.asking.keys(8)
    engine.comes("before")
    assert engine.made.hands_over("before")
    assert engine.waits("before", ends)
    engine.made.reset()
    assert not engine.made.hands_over("before")
    assert not engine.waits("before", ends)
    engine.comes("after")
    assert not engine.waits("after", engine.asking.keys(8))
    assert not engine.made.hands_over("after")
    assert not engine.made.hands_over("unknown")


def test_memory_is_waited_for_where_it_is_shared(stack: Stack) -> None:
    """By an engine with no other tier: where another engine of its stack has some of it."""
    alone = Answering(stack, (FULL,))
    ends = alone.asking.keys(2)
    alone.comes("a")
    assert not alone.waits("a", ends, 2 * CHUNK)
    with Stack.open(stack.config, TWO_GROUPS) as other:
        engine = Answering(other, (FULL,))
        engine.comes("a")
        assert engine.waits("a", ends, 2 * CHUNK)
        stored(stack, ends)
        other.chain.tiers[0].refresh()
        assert not engine.waits("a", ends, 2 * CHUNK)
        assert engine.asking.hit("a", ends, 2 * CHUNK) == 2 * CHUNK


def test_short_prompts_are_waited_for_as_long_as_computing_takes(disk: Stack) -> None:
    """Though others have not come, at least for an eighth of a second."""
    engine = Answering(disk, (FULL,))
    for number in range(4):
        engine.comes(name := f"in vain {number}")
        ends = engine.asking.keys(1, first=100 * number)
        assert engine.waits(name, ends, CHUNK)
        engine.now[0] += 0.124
        assert engine.waits(name, ends, CHUNK)
        engine.now[0] += CHUNK / 1024
        assert not engine.waits(name, ends, CHUNK)
