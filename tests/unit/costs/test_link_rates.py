"""What is believed of a link: its line, what is under way on it, and when it may be asked again."""

from __future__ import annotations

import pytest
from support.processes.clocks import Clock

from kvtier.cost.model import CostModel, Prefill
from kvtier.cost.rates import DeviceRate, Line, LinkRate, LoadRun


def a_line() -> Line:
    """That rests on ten samples of y = x."""
    line = Line(ridge_base=0.01)
    for x in (1.0, 10.0) * 5:
        line.observe(x, x)
    return line


def a_link() -> LinkRate:
    return LinkRate(latency=0.0, bandwidth=1e6)


def test_one_outlier_above_and_one_below_are_still_outliers() -> None:
    line = a_line()
    line.observe(10.0, 1000.0)
    line.observe(10.0, 0.1)
    assert line.at(10.0) == pytest.approx(10.0, rel=0.2)


def test_both_of_two_that_are_far_off_on_one_side_count() -> None:
    line = a_line()
    line.observe(1.0, 30.0)
    line.observe(10.0, 40.0)
    assert line.at(1.0) > 15.0
    assert line.at(10.0) == pytest.approx(40.0, rel=0.1)


@pytest.mark.parametrize("size", [10_000, 1_000_000])
def test_a_link_is_as_slow_as_its_oldest_load_is_late(size: int) -> None:
    link = a_link()
    expected = link.start(1, size, 1000.0) - 1000.0
    link.start(2, size, 1001.0)
    in_time = link.terms(1000.0)
    for late, factor in ((2 * expected + 0.09, 1.0), (3 * expected + 1.0, 3 + 1.0 / expected)):
        link.collected = 1000.0 + late
        assert link.terms(link.collected) == pytest.approx([term * factor for term in in_time])


def test_a_good_surprise_lets_a_link_be_asked_at_once_and_nothing_else_does() -> None:
    link = a_link()
    for seconds, expected in ((1.0, 105.0), (0.9, 105.0), (0.2, 100.0), (1.0, 105.0)):
        link.observe(1_000_000, seconds, 100.0, probe_seconds=5.0)
        assert link.next_probe == expected
    link.next_probe = 300.0
    link.observe(1_000_000, 1.0, 100.0, probe_seconds=5.0)
    assert link.next_probe == 300.0


def test_a_load_that_took_no_time_is_a_fast_one() -> None:
    link = a_link()
    link.observe(1_000_000, 0.0, 100.0, probe_seconds=5.0)
    assert link.line.at(1_000_000) < 1e-6


def a_device() -> DeviceRate:
    """A second for a million bytes, and four while memory is not pinned."""
    return DeviceRate(latency=0.0, bandwidth=1e6, pageable=0.25e6)


def wait(link: DeviceRate, now: float) -> float:
    return link.terms(now)[0]


def test_what_is_queued_on_the_device_link_goes_by_time() -> None:
    link = a_device()
    for token in range(3):
        link.start(token, 1_000_000, 1000.0)
    assert wait(link, 1000.0) == pytest.approx(3.0, rel=0.01)
    assert wait(link, 1002.0) == pytest.approx(1.0, rel=0.02)
    link.collected = 1100.0
    assert wait(link, 1100.0) == 0.0, "word of their ends is late, and they are not"
    link.start(3, 1_000_000, 1100.0)
    assert wait(link, 1100.0) == pytest.approx(1.0, rel=0.01)
    assert [link.end(token) for token in range(4)] == [1_000_000] * 4
    assert wait(link, 1100.0) == 0.0


def test_copies_begin_when_the_device_has_ended_what_it_computes() -> None:
    link = a_device()
    link.held(1002.0)
    assert wait(link, 1000.0) == 2.0
    assert link.start(0, 1_000_000, 1000.0) == pytest.approx(1003.0, rel=0.01)
    link.held(1001.0)
    assert wait(link, 1001.0) == pytest.approx(2.0, rel=0.01)
    link.held(1005.0)
    assert wait(link, 1004.0) == pytest.approx(1.0, rel=0.01), "it has ended by then"


def test_memory_that_is_not_pinned_is_a_link_of_its_own() -> None:
    link = a_device()
    assert link.besides() == {}
    link.pinned(False, 1000.0)
    assert link.line.at(1_000_000) == pytest.approx(4.0, rel=0.01)
    for at in range(20):
        link.observe(1_000_000, 10.0, 1000.0 + at, 5.0)
    assert link.line.at(1_000_000) == pytest.approx(10.0, rel=0.1)
    link.pinned(True, 1020.0)
    link.observe(1_000_000, 10.0, 1020.5, 5.0)  # it began before
    assert link.line.at(1_000_000) == pytest.approx(1.0, rel=0.01)
    link.observe(1_000_000, 0.5, 1022.0, 5.0)
    assert link.line.at(1_000_000) < 0.8
    (told,) = link.besides().values()
    assert (told.samples, told.bandwidth) == (20, pytest.approx(0.1e6, rel=0.1))


# -- what an engine's steps teach of the time that prompts take to compute


BLOCK_TOKENS = 128
BLOCK_BYTES = 4 << 20


def _serve_slow_hits(model: CostModel, clock: Clock, requests: int) -> int:
    """Prompts of 8,192 tokens whose load takes twice as long as computing them, and short turns of
    others between them, on an engine whose steps have overhead; how many blocks were loaded."""
    blocks, loaded = 8192 // BLOCK_TOKENS, 0
    recompute = _compute(CostModel(clock=Clock()), Clock(), 8192)
    for number in range(requests):
        taken = model.admit([LoadRun("far", blocks, blocks * BLOCK_BYTES)], BLOCK_TOKENS)
        if taken:
            seconds = 2 * recompute * taken / blocks
            model.started("far", number, taken * BLOCK_BYTES)
            clock.now += seconds
            model.ended("far", number, True, seconds)
        _compute(model, clock, (blocks - taken) * BLOCK_TOKENS + 100)
        loaded += taken
        for turn in range(5):
            _compute(model, clock, 64 + turn * 61)
        clock.now += 1.0
    return loaded


def _compute(model: CostModel, clock: Clock, tokens: int) -> float:
    """In steps of at most 2,048 tokens, which take 28 ms each however few those are."""
    began = clock.now
    while tokens > 0:
        step = min(tokens, 2048)
        seconds = 0.028 + step / 20_000
        clock.now += seconds
        model.observe_prefill(step, seconds)
        tokens -= step
    return clock.now - began


@pytest.mark.parametrize("turns", [0, 50, 500])
def test_many_short_turns_do_not_make_slow_loads_look_worth_it(turns: int) -> None:
    clock = Clock()
    model = CostModel(clock=clock)
    _compute(model, clock, 16_384)
    for turn in range(turns):
        _compute(model, clock, 64 + turn * 37 % 300)
    assert _serve_slow_hits(model, clock, 100) <= 0.06 * 100 * 64


@pytest.mark.parametrize("first", [0.0, 30.0])
def test_after_a_start_it_is_found_out_what_long_prompts_take(first: float) -> None:
    """Even if all of them are hits, and if the very first step was held up."""
    clock = Clock()
    model = CostModel(clock=clock)
    if first:
        model.observe_prefill(2048, first)
    assert _serve_slow_hits(model, clock, 100) <= 0.06 * 100 * 64


def test_an_engine_that_becomes_slow_is_noticed_by_prompts_shorter_than_ever() -> None:
    clock = Clock()
    model = CostModel(clock=clock)
    model.observe_prefill(16_384, 16_384 / 20_000)
    for number in range(20):
        taken = model.admit([LoadRun("far", 16, 16 * BLOCK_BYTES)], BLOCK_TOKENS)
        seconds = 0.2 + 0.005 * taken if taken else 0.0
        if taken:
            model.observe_load("far", taken * BLOCK_BYTES, seconds)
        model.observe_prefill((16 - taken) * BLOCK_TOKENS + 100, 1.0 if taken < 16 else 0.05)
        clock.now += 1.0
        assert taken == 16 or number < 10


def test_a_short_step_is_no_measure_of_prompts_unless_it_is_much_faster() -> None:
    prefill = Prefill()
    prefill.observe(2048, 0.2048, 0)
    prefill.observe(100, 0.009, 0)
    assert prefill.doubt(2048) == 1.0
    assert prefill.seconds(0, 2048) == pytest.approx(0.2048)
    prefill.tried(8192)
    prefill.observe(100, 0.001, 0)
    assert prefill.doubt(2048) < 1.0, "what was computed before has told something else"
    prefill.tried(2048)
    prefill.tried(128)
    assert prefill.doubt(2048) == 1.0


def test_a_step_of_few_tokens_tells_nothing_even_where_none_is_long() -> None:
    prefill = Prefill()
    prefill.observe(100, 0.01, 0)
    prefill.observe(40, 0.02, 0)
    assert prefill.seconds(0, 100) == pytest.approx(0.01)


def test_what_a_longer_step_told_is_believed_of_longer_prompts() -> None:
    prefill = Prefill()
    for tokens in (100, 400):
        prefill.observe(tokens, tokens / 10_000, 0)
        assert prefill.doubt(tokens) == 1.0
        assert prefill.doubt(tokens + 1) < 1.0
