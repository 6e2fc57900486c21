"""What an engine's steps teach of the time that prompts take to compute."""

from __future__ import annotations

import pytest
from support.processes.clocks import Clock

from kvtier.cost.model import CostModel, Prefill
from kvtier.cost.rates import LoadRun

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
