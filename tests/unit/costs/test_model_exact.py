"""What the cost model takes is what a plain look at all possibilities finds to be fastest."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest

from kvtier.cost.model import CostModel, Prior
from kvtier.cost.rates import DEVICE, LoadRun, Offer

PER_BLOCK = 128
NAMES = ("disk", "bucket", "tape")


def a_model(dice: random.Random) -> CostModel:
    """Random links, and prompts that cost more the longer they are; nothing is probed."""
    priors = {
        name: Prior(latency=dice.uniform(0.0, 0.2), bandwidth=10 ** dice.uniform(7.5, 9.5))
        for name in (DEVICE, *NAMES)
    }
    model = CostModel(priors=priors, clock=lambda: 1000.0)
    each = dice.uniform(2e-5, 3e-4)
    model.observe_prefill(2048, 2048 * each)
    model.observe_prefill(2048, 2048 * each * dice.uniform(1.0, 3.0), context=16384)
    for name in priors:
        model._link(name).next_probe = math.inf
    return model


def recompute(model: CostModel, start: int, stop: int) -> float:
    seconds = model.recompute_seconds(start, stop)
    assert seconds is not None
    return seconds


def loading(model: CostModel, sizes: dict[str, float]) -> float:
    """Links work side by side, and everything crosses the device's."""
    device = model.load_seconds(DEVICE, 0)
    each = model.load_seconds(DEVICE, 1) - device
    slowest = device + each * sum(sizes.values())
    for link, size in sizes.items():
        if link != DEVICE:
            fixed = model.load_seconds(link, 0)
            slowest = max(slowest, fixed + (model.load_seconds(link, 1) - fixed) * size)
    return slowest


@pytest.mark.parametrize("seed", range(40))
def test_leading_blocks(seed: int) -> None:
    dice = random.Random(seed)
    model = a_model(dice)
    start = PER_BLOCK * dice.randrange(0, 40)
    links = [dice.choice((DEVICE, *NAMES)) for _ in range(dice.randrange(1, 5))]
    runs = []
    for link in links:
        blocks = dice.randrange(1, 60)
        runs.append(LoadRun(link, blocks, blocks * dice.choice((1 << 20, 4 << 20))))
    total = sum(run.blocks for run in runs)
    stop = start + total * PER_BLOCK
    needed = [recompute(model, start, stop)]
    sizes: dict[str, float] = defaultdict(float)
    limits = {name: dice.choice((math.inf, dice.uniform(0.05, 1.0))) for name in NAMES}
    for name, seconds in limits.items():
        model.limit(name, seconds)
    latest = total
    for run in runs:
        for _ in range(run.blocks):
            sizes[run.link] += run.bytes / run.blocks
            rest = recompute(model, start + len(needed) * PER_BLOCK, stop)
            late = model.load_seconds(run.link, sizes[run.link]) > limits.get(run.link, math.inf)
            if late:
                latest = min(latest, len(needed) - 1)
            needed.append(math.inf if len(needed) > latest else loading(model, sizes) + rest)
    taken = model.admit(runs, PER_BLOCK, start)
    assert needed[taken] == pytest.approx(min(needed))
    assert taken <= latest
    counted = [model.stats()[name] for name in dict.fromkeys(links)]
    assert sum(link.taken for link in counted) == taken
    assert sum(link.refused for link in counted) == total - taken


@pytest.mark.parametrize("seed", range(40))
def test_offers(seed: int) -> None:
    dice = random.Random(seed)
    model = a_model(dice)
    start = PER_BLOCK * dice.randrange(0, 40)
    offers, stop, held = [], start, dict.fromkeys((DEVICE, *NAMES), 0)
    for _ in range(dice.randrange(1, 6)):
        stop += PER_BLOCK * dice.randrange(1, 40)
        for name in dice.sample(sorted(held), dice.randrange(1, 3)):
            held[name] += dice.randrange(1, 30)
        loads = [LoadRun(name, blocks, blocks << 21) for name, blocks in held.items() if blocks]
        offers.append(Offer(stop, loads))
    limits = {name: dice.choice((math.inf, dice.uniform(0.05, 1.0))) for name in NAMES}
    for name, seconds in limits.items():
        model.limit(name, seconds)
    gains = [
        -math.inf
        if any(
            model.load_seconds(run.link, run.bytes) > limits.get(run.link, math.inf)
            for run in offer.loads
        )
        else recompute(model, start, offer.stop)
        - loading(model, {run.link: run.bytes for run in offer.loads})
        for offer in offers
    ]
    chosen = model.choose(offers, start)
    if max(gains) <= 0:
        assert chosen == -1
    else:
        assert gains[chosen] == pytest.approx(max(gains))
    taken = {run.link: run.blocks for run in offers[chosen].loads} if chosen >= 0 else {}
    for run in offers[-1].loads:
        link = model.stats()[run.link]
        assert (link.taken, link.refused) == (
            taken.get(run.link, 0),
            run.blocks - taken.get(run.link, 0),
        )


def test_what_is_told_of_a_link_is_what_was_measured() -> None:
    model = CostModel(clock=lambda: 1000.0)
    for size in (1 << 20, 1 << 24, 1 << 27) * 20:
        model.observe_load("disk", size, 0.01 + size / 5e8)
    told = model.stats()["disk"]
    assert told.bandwidth == pytest.approx(5e8, rel=0.1)
    assert told.latency == pytest.approx(0.01, rel=0.2)


def test_while_nothing_is_known_of_prefill_everything_is_taken_and_counted() -> None:
    model = CostModel(clock=lambda: 1000.0)
    offers = [
        Offer(128, [LoadRun("disk", 1, 1)]),
        Offer(256, [LoadRun("disk", 2, 2), LoadRun(DEVICE, 1, 1)]),
    ]
    assert model.choose(offers, 0) == 1
    assert (model.stats()["disk"].taken, model.stats()[DEVICE].taken) == (2, 1)
