"""What is refused, what wins it back, and what is tried to learn: of any hit, asked either way."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from support.processes.clocks import Clock

from kvtier.cost.model import CostModel, CostSettings
from kvtier.cost.rates import DEVICE, LoadRun, Offer

BLOCK_TOKENS = 128
BLOCK_BYTES = 4 << 20
BLOCK_SECONDS = 0.0128
"""To compute one."""
START = 100 * BLOCK_TOKENS


def known(clock: Clock, step: int = 2048, **links: tuple[float, float]) -> CostModel:
    """What each link takes for a load: its latency, and the time of a block against computing."""
    model = CostModel(clock=clock)
    model.observe_prefill(step, step * BLOCK_SECONDS / BLOCK_TOKENS)
    for _ in range(30):
        for name, (latency, share) in {DEVICE: (0.0, 0.001), **links}.items():
            for blocks in (1, 16):
                seconds = latency + blocks * share * BLOCK_SECONDS
                model.observe_load(name, blocks * BLOCK_BYTES, seconds)
        clock.now += 10.0
    return model


def by_offers(model: CostModel, held: int, blocks: int) -> int:
    """How much is taken of a hit of any length, of which some blocks are in host memory."""
    offers = []
    for stop in range(1, held + blocks + 1):
        counts = {DEVICE: min(stop, held), "far": max(0, stop - held)}
        loads = [
            LoadRun(name, count, count * BLOCK_BYTES) for name, count in counts.items() if count
        ]
        offers.append(Offer(START + stop * BLOCK_TOKENS, loads))
    return model.choose(offers, START) + 1


def by_runs(model: CostModel, held: int, blocks: int) -> int:
    counts = {DEVICE: held, "far": blocks}
    runs = [LoadRun(name, count, count * BLOCK_BYTES) for name, count in counts.items() if count]
    return model.admit(runs, BLOCK_TOKENS, START)


Ask = Callable[[CostModel, int, int], int]
both = pytest.mark.parametrize("ask", [by_runs, by_offers])


def unprobed(model: CostModel, *links: str) -> None:
    for name in links:
        model._link(name).next_probe = math.inf


@both
def test_a_link_that_was_refused_wins_it_back_by_a_clear_lead(ask: Ask) -> None:
    model = known(Clock(), far=(0.0, 1.1))
    unprobed(model, "far", DEVICE)
    assert ask(model, 0, 20) == 0
    assert model.stats()["far"].refusing
    assert not model.stats()[DEVICE].refusing
    model._link(DEVICE).refusing = True
    for share, taken in ((0.9, 0), (0.7, 20), (0.9, 20)):
        for _ in range(60):
            model.observe_load("far", 16 * BLOCK_BYTES, 16 * share * BLOCK_SECONDS)
        assert ask(model, 0, 20) == taken
        assert model.stats()["far"].refusing == model.stats()[DEVICE].refusing == (not taken)


@both
def test_a_link_of_which_a_part_is_taken_is_not_refused(ask: Ask) -> None:
    model = known(Clock(), far=(0.0, 0.5))
    model.limit("far", 10.5 * 0.5 * BLOCK_SECONDS)
    unprobed(model, "far")
    assert ask(model, 0, 20) == 10
    assert (model.stats()["far"].taken, model.stats()["far"].refused) == (10, 10)
    assert not model.stats()["far"].refusing


@both
def test_those_who_wait_count(ask: Ask) -> None:
    model = known(Clock(), far=(0.0, 1.5))
    unprobed(model, "far", DEVICE)
    assert ask(model, 0, 20) == 0
    model.observe_waiting(1)
    assert ask(model, 0, 20) == 20


def test_how_long_computing_keeps_all_who_wait_from_the_engine() -> None:
    model = CostModel(clock=Clock())
    assert model.spared_seconds(0, 1000) == model.prefill_rate == 0.0, "not known"
    model.observe_prefill(2048, 2.048)
    assert model.prefill_rate == pytest.approx(1000.0)
    for waiting, seconds in ((0, 1.0), (3, 4.0), (100, 8.0)):
        model.observe_waiting(waiting)
        assert model.spared_seconds(0, 1000) == pytest.approx(seconds)


@both
@pytest.mark.parametrize(
    ("held", "latency", "share", "limit", "probed"),
    [
        (0, 0.0, 2.2, math.inf, 4),
        (0, 0.06, 2.0, math.inf, 5),
        (0, 0.3, 2.0, math.inf, 22),
        (0, 0.0, 2.0, 0.09, 3),
        (0, 0.0, 2.0, 0.01, 1),
        (0, 1.5, 2.0, 1.0, 1),
        (32, 0.0, 1.5, math.inf, 10),
    ],
    ids=[
        "what slows the request a little",
        "less its latency",
        "enough to tell",
        "in time",
        "at least one",
        "late",
        "beyond",
    ],
)
def test_how_much_is_tried_of_what_is_refused(
    ask: Ask, held: int, latency: float, share: float, limit: float, probed: int
) -> None:
    model = known(Clock(), far=(latency, share))
    model.limit("far", limit)
    taken = ask(model, held, 64 - held)
    link = model.stats()["far"]
    assert (link.probes, link.probed, link.refusing) == (1, taken - held, True)
    assert link.probed == pytest.approx(probed, rel=0.05)


@both
def test_a_link_of_which_something_surprising_was_seen_is_tried_with_more(ask: Ask) -> None:
    model = known(Clock(), far=(0.0, 2.2))
    model.observe_load("far", 16 * BLOCK_BYTES, 100 * 16 * 2.2 * BLOCK_SECONDS)
    for _ in range(7):
        model.observe_load("far", 16 * BLOCK_BYTES, 16 * 2.2 * BLOCK_SECONDS)
    model._link("far").next_probe = 0.0
    assert ask(model, 0, 64) == 6, "a quarter of recomputing"
    model.observe_load("far", 16 * BLOCK_BYTES, 16 * 2.2 * BLOCK_SECONDS)
    model._link("far").next_probe = 0.0
    assert ask(model, 0, 64) == 3, "no surprise in eight loads"


@both
def test_a_probe_that_costs_much_waits_a_minute_for_a_longer_hit(ask: Ask) -> None:
    clock = Clock()
    model = known(clock, far=(0.3, 2.0))
    assert ask(model, 0, 64) > 0, "the first one need not"
    began = clock.now
    clock.now = began + 50.0
    assert ask(model, 0, 64) == 0
    assert ask(model, 0, 1280) > 0
    clock.now += 59.0
    assert ask(model, 0, 64) == 0
    clock.now += 7.0
    assert ask(model, 0, 64) > 0, "none has come"


@both
def test_what_would_win_but_for_what_it_has_to_win_back_is_tried_whole(ask: Ask) -> None:
    model = known(Clock(), far=(0.0, 0.9))
    model._link("far").refusing = True
    assert ask(model, 32, 32) == 64
    assert model.stats()["far"].probed == 32
    assert ask(model, 32, 32) == 32, "not again at once"
    late = known(Clock(), far=(0.0, 0.9))
    late._link("far").refusing = True
    late.limit("far", 10.5 * 0.9 * BLOCK_SECONDS)
    assert ask(late, 0, 64) == 10, "of what would come in time"


@pytest.mark.parametrize(
    ("held", "latency", "share", "pause"),
    [(32, 0.0, 1.2, 5.0), (0, 0.3, 2.0, 60.0), (0, 10.0, 2.0, 300.0)],
    ids=["at least", "as much as it loses", "at most"],
)
def test_how_long_nothing_is_tried_again(
    held: int, latency: float, share: float, pause: float
) -> None:
    clock = Clock()
    model = known(clock, far=(latency, share))
    for after, probes in ((0.0, 1), (0.97 * pause, 1), (0.06 * pause, 2)):
        clock.now += after
        by_offers(model, held, 64 - held)
        assert model.stats()["far"].probes == probes


@both
def test_an_engine_of_short_steps_is_believed_once_it_has_computed_a_hit(ask: Ask) -> None:
    """Until then only a quarter of what computing seems to take is held to be true."""
    model = known(Clock(), step=256, far=(0.0, 0.5))
    unprobed(model, "far", DEVICE)
    assert ask(model, 0, 64) == 0
    assert ask(model, 0, 64) == 64
    short = known(Clock(), step=256, far=(0.0, 0.5))
    unprobed(short, "far", DEVICE)
    assert ask(short, 0, 2) == 2, "no longer than a step"
    assert ask(short, 64, 2) == 64
    assert ask(short, 0, 64) == 0, "only the two at the end were computed"


def test_only_the_link_that_ends_the_prefix_is_refused() -> None:
    model = known(Clock(), near=(0.0, 0.1), far=(0.5, 3.0))
    unprobed(model, "far")
    model._link(DEVICE).refusing = True
    loads = [("near", 1), ("far", 30), (DEVICE, 1), ("tape", 1)]
    assert model.admit([LoadRun(name, n, n * BLOCK_BYTES) for name, n in loads], BLOCK_TOKENS) == 1
    refusing = {name for name, link in model.stats().items() if link.refusing}
    assert refusing == {"far"}, "and the device, which all that is taken crosses, no more"


def test_settings_bound_the_probes() -> None:
    clock = Clock()
    model = CostModel(CostSettings(probe_seconds=60.0), clock=clock)
    model.observe_prefill(2048, 2048 * BLOCK_SECONDS / BLOCK_TOKENS)
    for _ in range(3):
        model.observe_load("far", BLOCK_BYTES, 0.5)
    probed = []
    for _ in range(600):
        clock.now += 1.0
        if by_runs(model, 0, 8):
            probed.append(clock.now)
            model.observe_load("far", BLOCK_BYTES, 0.5)
    assert 8 <= len(probed) <= 10
