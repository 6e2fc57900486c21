"""The cost model against simulated links: what it learns, refuses, probes, and what it loses."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.processes.clocks import Clock

from kvtier.cost.model import CostModel, CostSettings, Prior
from kvtier.cost.rates import DEVICE, LoadRun, Offer

BLOCK_TOKENS = 128
BLOCK_BYTES = 4 << 20
TOKENS_A_SECOND = 10_000.0


@dataclass
class SimLink:
    """A link whose latency and bandwidth a test may change at any time."""

    latency: float
    bandwidth: float
    noise: Callable[[], float] = lambda: 1.0

    def mean(self, size: int) -> float:
        return self.latency + size / self.bandwidth

    def seconds(self, size: int) -> float:
        return self.mean(size) * self.noise()


@dataclass
class Engine:
    """One request at a time: asks the model, loads, recomputes the rest, reports both."""

    links: dict[str, SimLink]
    tokens_a_second: float = TOKENS_A_SECOND
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.model = CostModel(clock=self.clock)
        self._token = 0
        self.model.observe_prefill(2048, 2048 / self.tokens_a_second)

    def request(self, link: str, blocks: int, think: float = 1.0) -> tuple[int, float]:
        """Serve a hit of `blocks` on one link; blocks loaded, and the request's seconds."""
        taken = self.model.admit([LoadRun(link, blocks, blocks * BLOCK_BYTES)], BLOCK_TOKENS)
        seconds = 0.0
        if taken:
            size = taken * BLOCK_BYTES
            self._token += 1
            self.model.started(link, self._token, size)
            own, device = self.links[link].seconds(size), self.links[DEVICE].seconds(size)
            seconds = max(own, device)
            self.clock.now += seconds
            self.model.ended(link, self._token, True, own)
            self.model.observe_load(DEVICE, size, device)
        tokens = (blocks - taken) * BLOCK_TOKENS + 512
        prefill = tokens / self.tokens_a_second
        self.clock.now += prefill + think
        self.model.observe_prefill(tokens, prefill)
        return taken, seconds + prefill

    def best(self, link: str, blocks: int) -> float:
        """What an oracle that knows the mean rates would need."""
        size = blocks * BLOCK_BYTES
        load = max(self.links[link].mean(size), self.links[DEVICE].mean(size))
        recompute = blocks * BLOCK_TOKENS / self.tokens_a_second
        return min(load, recompute) + 512 / self.tokens_a_second


def engine(latency: float, bandwidth: float, **more: float) -> Engine:
    return Engine(
        {"far": SimLink(latency, bandwidth), DEVICE: SimLink(20e-6, 10e9)},
        **more,  # type: ignore[arg-type]
    )


def test_takes_everything_while_nothing_is_known_of_prefill() -> None:
    model = CostModel(clock=Clock())
    assert model.recompute_seconds(0, 100) is None
    assert model.admit([LoadRun("far", 7, 7 << 40)], BLOCK_TOKENS) == 7
    assert model.stats()["far"].taken == 7
    offers = [
        Offer(128, [LoadRun("disk", 1, 1)]),
        Offer(256, [LoadRun("disk", 2, 2), LoadRun(DEVICE, 1, 1)]),
    ]
    assert model.choose(offers, 0) == 1
    assert (model.stats()["disk"].taken, model.stats()[DEVICE].taken) == (2, 1)
    model.observe_prefill(0, 1.0)
    model.observe_prefill(9, 0.0)
    assert model.recompute_seconds(0, 100) is None, "such steps tell nothing"


def test_the_disk_hit_of_40_seconds_against_a_prefill_of_900_ms() -> None:
    """It may happen once, because the disk was unknown; then only probes, small and rare."""
    slow = engine(0.0, 70 * BLOCK_BYTES / 40)
    slow.tokens_a_second = 70 * BLOCK_TOKENS / 0.9
    slow.model.observe_prefill(70 * BLOCK_TOKENS, 0.9)
    first, _ = slow.request("far", 70)
    assert first == 70
    started = slow.clock.now
    lost = 0.0
    for _ in range(500):
        taken, seconds = slow.request("far", 70)
        assert taken <= 1
        lost += seconds - slow.best("far", 70)
    stats = slow.model.stats()["far"]
    assert stats.refusing
    assert stats.probes >= 10
    assert lost <= 0.03 * (slow.clock.now - started)


def test_a_load_that_does_not_end_stops_others_before_it_is_measured() -> None:
    slow = engine(0.001, 3e9)
    model, clock = slow.model, slow.clock
    for _ in range(5):
        slow.request("far", 64)
    hit = [LoadRun("far", 64, 64 * BLOCK_BYTES)]
    assert model.admit(hit, BLOCK_TOKENS) == 64
    model.started("far", 1000, 64 * BLOCK_BYTES)
    clock.now += 2.0
    assert model.admit(hit, BLOCK_TOKENS) == 64, "it may have ended during a long step"
    model.collected()
    assert model.admit(hit, BLOCK_TOKENS) < 64
    clock.now += 8.0
    model.ended("far", 1000, False, 10.0)
    assert model.load_seconds("far", 64 * BLOCK_BYTES) < 1.0, "one outlier is not believed"
    model.started("far", 1001, 64 * BLOCK_BYTES)
    clock.now += 10.0
    model.ended("far", 1001, False, 10.0)
    assert model.load_seconds("far", 64 * BLOCK_BYTES) > 5.0, "a second one is"


def test_a_load_nobody_ends_is_given_up() -> None:
    fast = engine(0.001, 3e9)
    fast.request("far", 64)
    fast.model.started("far", 1000, 64 * BLOCK_BYTES)
    fast.clock.now += 1000.0
    hit = [LoadRun("far", 64, 64 * BLOCK_BYTES)]
    fast.model.admit(hit, BLOCK_TOKENS)
    assert fast.model.admit(hit, BLOCK_TOKENS) == 64
    before = fast.model.load_seconds("far", BLOCK_BYTES)
    fast.model.ended("far", 1000, True, 1000.0)
    assert fast.model.load_seconds("far", BLOCK_BYTES) == before, "nor does its end teach anything"


def test_a_bucket_that_becomes_slow_while_serving_and_recovers() -> None:
    bucket = engine(0.02, 1e9)
    assert all(bucket.request("far", 50)[0] == 50 for _ in range(20))
    bucket.links["far"].bandwidth = 2e7
    slow = [bucket.request("far", 50)[0] for _ in range(100)]
    assert slow.count(50) <= 2, "two slow loads are enough"
    assert 0 < sum(1 for taken in slow if 0 < taken < 50) <= 25, "probes, few of them"
    bucket.links["far"].bandwidth = 1e9
    back = [bucket.request("far", 50)[0] for _ in range(100)]
    first = back.index(50)
    assert first * 2 < 330, "found out at the latest by the floor of probes"
    assert all(taken == 50 for taken in back[first:])


def test_queued_bytes_count_as_waiting() -> None:
    link = engine(0.001, 1e9)
    link.model = CostModel(CostSettings(waiting_requests_max=1.0), clock=link.clock)
    link.model.observe_prefill(2048, 2048 / TOKENS_A_SECOND)
    for _ in range(5):
        link.request("far", 64)
    admitted = 0
    for token in range(50):
        if not link.model.admit([LoadRun("far", 64, 64 * BLOCK_BYTES)], BLOCK_TOKENS):
            break
        admitted += 1
        link.model.started("far", 2000 + token, 64 * BLOCK_BYTES)
    load, recompute = 64 * BLOCK_BYTES / 1e9, 64 * BLOCK_TOKENS / TOKENS_A_SECOND
    assert recompute / load - 2 <= admitted <= recompute / load + 1


def test_loads_that_hang_are_nobody_to_spare() -> None:
    clock = Clock()
    model = _known(clock, near=(0.0, 1e9), far=(0.0, 64 * BLOCK_BYTES / 2.4))
    model._link("far").next_probe = float("inf")
    for token in range(8):
        model.started("near", token, 1 << 20)
    hit = [_run("far", 64)]
    assert model.admit(hit, BLOCK_TOKENS) == 64, "2.4 seconds against 0.8, for nine requests"
    clock.now += 60
    model.collected()
    assert model.admit(hit, BLOCK_TOKENS) == 0, "nobody knows when the others will go on"


def test_a_load_that_spares_others_may_take_longer_than_computing() -> None:
    recompute, load = 64 * BLOCK_TOKENS / TOKENS_A_SECOND, 64 * BLOCK_BYTES / 1e8
    model = _known(far=(0.0, 1e8))
    hit = [_run("far", 64)]
    needed = int(load / recompute)
    for waiting, taken in ((0, 0), (needed - 1, 0), (needed + 1, 64), (0, 0)):
        model.observe_waiting(waiting)
        model._link("far").next_probe = float("inf")
        model._link("far").refusing = model._link(DEVICE).refusing = False
        assert model.admit(hit, BLOCK_TOKENS) == taken, waiting
    far = _known(far=(0.0, 1e8 / 8))
    far.observe_waiting(1000)
    far._link("far").next_probe = float("inf")
    assert far.admit(hit, BLOCK_TOKENS) == 0, "but not for ever"


def test_those_whose_loads_end_while_the_engine_computes_are_spared_in_part() -> None:
    model = _known(near=(0.0, 1e9), far=(0.0, 64 * BLOCK_BYTES / 1.2))
    recompute, hit = 64 * BLOCK_TOKENS / TOKENS_A_SECOND, [_run("far", 64)]
    model._link("far").next_probe = float("inf")
    assert model.admit(hit, BLOCK_TOKENS) == 0, "1.2 seconds against 0.8"
    model._link("far").refusing = model._link(DEVICE).refusing = False
    model.started("near", 1, int(recompute * 0.8 * 1e9))
    assert model.admit(hit, BLOCK_TOKENS) == 0, "another waits for a fifth of the 0.8"
    model._link("far").refusing = model._link(DEVICE).refusing = False
    model.started("near", 2, 1)
    model.ended("near", 1, True, recompute * 0.8)
    assert model.admit(hit, BLOCK_TOKENS) == 64, "another waits for all of it"


def test_nobody_gambles_for_others_on_a_link_that_was_never_used() -> None:
    model = CostModel(priors={"tape": Prior(latency=0.5, bandwidth=1e9)}, clock=Clock())
    model.observe_prefill(2048, 2048 / TOKENS_A_SECOND)
    model._link("tape").next_probe = float("inf")
    model.observe_waiting(1000)
    assert model.admit([_run("tape", 10)], BLOCK_TOKENS) == 0
    for _ in range(3):
        model.observe_load("tape", 10 * BLOCK_BYTES, 0.5 + 10 * BLOCK_BYTES / 1e9)
    assert model.admit([_run("tape", 10)], BLOCK_TOKENS) == 10, "but on one that is known"


def test_a_link_that_takes_as_long_for_one_byte_is_not_begun_either() -> None:
    model = CostModel(priors={"tape": Prior(latency=2.0, bandwidth=1e18)}, clock=Clock())
    model.observe_prefill(2048, 2048 / TOKENS_A_SECOND)
    model._link("tape").line.slope = 0.0
    model._link("tape").next_probe = float("inf")
    assert model.stats()["tape"].bandwidth == 0.0, "not known"
    hit = [_run("tape", 1000)]
    assert model.admit(hit, BLOCK_TOKENS) == 1000
    model.limit("tape", 1.9)
    assert model.admit(hit, BLOCK_TOKENS) == 0


def test_how_long_the_first_of_busy_links_is_busy() -> None:
    clock = Clock()
    priors = {"nvme": Prior(0.0, 1e9), "object": Prior(0.0, 1e8)}
    model = CostModel(priors=priors, clock=clock)
    assert model.drain_seconds() == 0.0
    model.started("object", 1, 10**9)
    assert model.drain_seconds() == pytest.approx(10.0, rel=0.1)
    model.started("nvme", 2, 10**9)
    assert model.drain_seconds() == pytest.approx(1.0, rel=0.1)
    clock.now += 100.0
    assert model.drain_seconds() == pytest.approx(1.0, rel=0.1), "nobody has asked since"
    model.collected()
    assert model.drain_seconds() > 10.0, "it is late"


def test_prefill_that_becomes_fast_ends_loads_and_slow_resumes_them() -> None:
    link = engine(0.01, 5e8)
    assert [link.request("far", 64)[0] for _ in range(10)] == [64] * 10
    link.tokens_a_second *= 10
    fast = [link.request("far", 64)[0] for _ in range(20)]
    assert fast.count(64) <= 3
    link.tokens_a_second /= 10
    slow = [link.request("far", 64)[0] for _ in range(20)]
    assert slow[5:] == [64] * 15


def test_a_link_that_would_win_is_not_held_down_by_probes_of_one_size() -> None:
    """Small ones say too little of what its latency is and what its bandwidth: if it is only to win
    back what it lost, the whole hit is tried."""
    link = engine(0.06, 64 * BLOCK_BYTES / 0.45)
    for _ in range(3):
        link.model.observe_load("far", 4 * BLOCK_BYTES, link.links["far"].mean(4 * BLOCK_BYTES))
    taken = [link.request("far", 64)[0] for _ in range(300)]
    assert taken[20:] == [64] * 280


def test_prefill_cost_grows_with_context() -> None:
    model = CostModel(clock=Clock())
    for context in range(0, 32768, 2048):
        model.observe_prefill(2048, 2048 * (1e-4 + 1e-8 * (context + 1024)), context)
    for start, stop in [(0, 2048), (0, 32768), (16384, 32768)]:
        true = (stop - start) * (1e-4 + 1e-8 * (start + stop) / 2)
        assert model.recompute_seconds(start, stop) == pytest.approx(true, rel=0.05)


def _known(clock: Clock | None = None, **links: tuple[float, float]) -> CostModel:
    model = CostModel(clock=clock or Clock())
    model.observe_prefill(2048, 2048 / TOKENS_A_SECOND)
    for _ in range(30):
        for name, (latency, bandwidth) in {DEVICE: (0.0, 1e10), **links}.items():
            for blocks in (1, 16):
                size = blocks * BLOCK_BYTES
                model.observe_load(name, size, latency + size / bandwidth)
    return model


def _run(link: str, blocks: int) -> LoadRun:
    return LoadRun(link, blocks, blocks * BLOCK_BYTES)


def test_a_prior_speaks_for_a_link_that_was_never_used() -> None:
    model = CostModel(priors={"tape": Prior(latency=60.0, bandwidth=1e8)}, clock=Clock())
    model.observe_prefill(2048, 2048 / TOKENS_A_SECOND)
    assert model.load_seconds("tape", 10**8) == pytest.approx(61.0, rel=0.1)
    model.admit([_run("tape", 10)], BLOCK_TOKENS)
    stats = model.stats()["tape"]
    assert (stats.refusing, stats.taken, stats.probes) == (True, 0, 1)
    assert model.admit([_run("tape", 10)], BLOCK_TOKENS) == 0, "the next probe has to wait"


def test_no_oscillation_where_both_cost_the_same() -> None:
    rng = random.Random(7)
    latency, recompute = 0.0, 64 * BLOCK_TOKENS / TOKENS_A_SECOND
    even = engine(latency, 64 * BLOCK_BYTES / recompute)
    even.links["far"].noise = lambda: rng.uniform(0.95, 1.05)
    refusing = []
    for _ in range(1000):
        even.request("far", 64)
        refusing.append(even.model.stats()["far"].refusing)
    flips = sum(before != after for before, after in itertools.pairwise(refusing))
    assert flips <= 2


def _changing_world(seed: int) -> tuple[float, float, float]:
    """Seconds of the model's answers, an oracle's, and the better of the two constant answers.

    Latency, bandwidth and the engine's speed jump by orders of magnitude every 200 requests; the
    oracle knows them at every moment.
    """
    rng, noise, pauses = (random.Random(seed + part) for part in (0, 1000, 2000))
    world = engine(0.01, 1e9)
    world.links["far"].noise = lambda: noise.lognormvariate(0, 0.25)
    mine = oracle = always = never = 0.0
    for step in range(2000):
        if step % 200 == 0:
            world.links["far"].latency = 10 ** rng.uniform(-3, 0)
            world.links["far"].bandwidth = 10 ** rng.uniform(7.5, 9.5)
            world.tokens_a_second = 10 ** rng.uniform(3.5, 4.5)
        blocks = rng.randrange(4, 100)
        size = blocks * BLOCK_BYTES
        base = 512 / world.tokens_a_second
        oracle += world.best("far", blocks)
        always += max(world.links["far"].mean(size), world.links[DEVICE].mean(size)) + base
        never += blocks * BLOCK_TOKENS / world.tokens_a_second + base
        mine += world.request("far", blocks, think=pauses.expovariate(1.0))[1]
    return mine, oracle, min(always, never)


@pytest.mark.slow
def test_regret_against_an_oracle_is_bounded() -> None:
    worlds = [_changing_world(seed) for seed in range(24)]
    regret = [mine / oracle for mine, oracle, _ in worlds]
    against_constant = [mine / constant for mine, _, constant in worlds]
    assert max(regret) <= 1.25
    assert sum(regret) / len(regret) <= 1.10
    assert max(against_constant) <= 1.08, "loading all, or nothing, is hardly ever better"
    assert sum(against_constant) / len(against_constant) <= 0.85


# -- what the cost model takes is what a plain look at all possibilities finds to be fastest


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
        model.limit(name, 2 * seconds)  # the shortest counts
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
