"""Many users at once, on a simulated engine as vLLM schedules it: what is loaded from CPU memory,
and what is computed instead."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import geometric_mean, mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes.clocks import Clock
from support.scheduler.scheduled_engine import (
    CHUNK,
    CHUNK_BYTES,
    TOKEN_BYTES,
    Engine,
    always,
    converse,
    greedily,
    model,
    never,
    settled,
)

from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE, LoadRun, Offer

COMPUTED = 38_000.0 * TOKEN_BYTES
"""So many bytes a second take as long as computing them, at the head of a prompt."""
USERS = [1, 4, 12, 40, 100, 200]


def against_both(ratio: float, users: int, *, remembers: bool) -> tuple[float, int]:
    """The mean first token, as a share of the better of loading all and loading nothing; and the
    blocks that were left."""
    how = {"bandwidth": ratio * COMPUTED, "remembers": remembers}
    others = [mean(converse(settled(policy, **how), users)) for policy in (always, never)]
    engine = settled(model, **how)
    return mean(converse(engine, users)) / min(others), engine.left


@pytest.mark.parametrize(
    "ratio", [3.0, *(pytest.param(each, marks=pytest.mark.slow) for each in (5.0, 10.0))]
)
@pytest.mark.parametrize("remembers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_loaded_several_times_as_fast_is_all_loaded(ratio: float, remembers: bool) -> None:
    for users in USERS:
        assert against_both(ratio, users, remembers=remembers) == (pytest.approx(1.0, abs=0.005), 0)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [3.0, 8.0])
@pytest.mark.parametrize("users", [4, 12])
def test_hardly_anything_is_faster_than_that(ratio: float, users: int) -> None:
    how = {"bandwidth": ratio * COMPUTED, "remembers": False}
    mine = mean(converse(settled(model, **how), users))
    assert mine <= 1.03 * mean(greedily(users, **how))


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "usual"), [(1.0, 0.84), (0.5, 0.87), (1.5, 0.94), (2.0, 1.0)])
def test_where_both_are_about_as_fast_they_share_the_work(ratio: float, usual: float) -> None:
    shares = [
        against_both(ratio, users, remembers=remembers)[0]
        for users in USERS
        for remembers in (True, False)
    ]
    assert max(shares) <= 1.08, "loading all, or nothing, is hardly ever better"
    assert geometric_mean(shares) <= usual


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_an_oracle_is_not_far_ahead(ratio: float) -> None:
    how = {"bandwidth": ratio * COMPUTED, "remembers": False}
    assert mean(converse(settled(model, **how), 4)) <= 1.15 * mean(greedily(4, **how))


def stalls(share: float, longest: float) -> Callable[[int], float]:
    """Launching a step takes some time, and now and then the thread gets no further for long."""
    dice = random.Random(3)
    return lambda tokens: (
        (0.02 if tokens else 0.001) + (longest * dice.random() if dice.random() < share else 0.0)
    )


@pytest.mark.parametrize("users", [20, 40, 100])
def test_an_engine_whose_thread_stalls_is_not_taken_for_a_fast_one(users: int) -> None:
    """The device computes a step while that is still being launched, and word of the one before is
    late: the engine seemed to compute up to fifteen times as fast as it does."""
    engine = Engine(model, stall=stalls(0.1, 0.3))
    rates = []
    for _ in range(2):
        converse(engine, users)
        rates.append(engine.model.prefill_rate)
    assert engine.left == 0
    assert max(rates) <= 2 * 40_000


BLOCKS = st.integers(1, 64)
SECONDS = st.floats(0.0, 10.0)


@given(
    held=BLOCKS,
    below=st.integers(0, 64),
    ratio=st.floats(3.0, 20.0),
    queue=st.tuples(SECONDS, SECONDS),
    waiting=st.integers(0, 200),
    loads=st.lists(st.integers(1, 200), max_size=50),
    start=st.integers(0, 100),
    offered=st.booleans(),
)
def test_no_block_in_cpu_memory_is_left_that_loads_three_times_as_fast(
    held: int,
    below: int,
    ratio: float,
    queue: tuple[float, float],
    waiting: int,
    loads: list[int],
    start: int,
    offered: bool,
) -> None:
    """Whatever is queued on either side, and whatever lies below."""
    costs = CostModel(clock=Clock())
    costs.observe_prefill(8192, 8192 / 40_000)
    for blocks in (1, 8, 64):
        for _ in range(10):
            size = blocks * CHUNK_BYTES
            costs.observe_load(DEVICE, size, size / (ratio * 40_000 * TOKEN_BYTES))
            costs.observe_load("nvme", size, 100.0)
    costs._device.refusing = True
    for number, blocks in enumerate(loads):
        costs.started(DEVICE, number, blocks * CHUNK_BYTES)
    costs.observe_waiting(waiting)
    costs.observe_queue(*queue)
    runs = [LoadRun(DEVICE, held, held * CHUNK_BYTES)]
    if below:
        runs.append(LoadRun("nvme", below, below * CHUNK_BYTES))
    at = start * CHUNK
    if not offered:
        assert costs.admit(runs, CHUNK, at) >= held
        return
    offers = [
        Offer(at + stop * CHUNK, [LoadRun(DEVICE, stop, stop * CHUNK_BYTES)])
        for stop in range(1, held + 1)
    ]
    if below:
        offers.append(Offer(at + (held + below) * CHUNK, runs))
    assert costs.choose(offers, at) >= held - 1
