"""Hits over several cache groups: how far they may reach, and how far it is worth going."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from support.tiers.chains import ChainRig, rule

from kvtier.chain.hits import (
    OFFERS_MAX,
    Decision,
    HitPlanner,
    HitRoom,
    Shape,
    Span,
    thin,
)
from kvtier.chain.plan import NOWHERE
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


def test_bytes_of_all_groups_decide() -> None:
    """One group alone would be worth its load; both together are not."""
    size = int(1e6 * CHUNK / TOKENS_A_SECOND * 0.7)
    one, two = spans(FULL, size=size), spans(FULL, FULL, size=size)
    assert worth(appraiser(disk=1e6)[0], one, [[1] * 8]) == LAST
    model, _ = appraiser(disk=1e6)
    worth(model, two, [[1] * 8] * 2)
    assert worth(model, two, [[1] * 8] * 2) == 0


def test_a_state_that_costs_much_pays_with_a_long_prompt_only() -> None:
    state = Span(STATE, make_keys(8, start=50), int(1e6 * CHUNK / TOKENS_A_SECOND * 3))
    full = Span(FULL, make_keys(8), 10)
    short, _ = appraiser(disk=1e6)
    places = [[1] * 2 + [NOWHERE] * 6, [1] * 8]
    worth(short, [full, state], places)
    assert worth(short, [full, state], places) == 0
    assert worth(appraiser(disk=1e6)[0], [full, state], [[1] * 8] * 2) == LAST


def test_the_head_in_memory_without_the_tail_on_a_slow_disk() -> None:
    model, _ = appraiser(disk=1e5)
    places = [[0] * 4 + [1] * 4, [0] * 4 + [1] * 4]
    worth(model, spans(FULL, WINDOW), places)
    assert worth(model, spans(FULL, WINDOW), places) == 4


def test_a_slow_disk_that_recovers_is_found_out() -> None:
    now = [0.0]
    costs = CostModel(priors={"disk": Prior(0.001, 1e5)}, clock=lambda: now[0])
    costs.observe_prefill(1000, 1000 / TOKENS_A_SECOND)
    of = HitPlanner(ChainCounters(MEDIA, NAMESPACE), costs, {}, time.monotonic)
    groups, places = spans(FULL, WINDOW), [[1] * LAST] * 2
    taken = 0
    for _ in range(400):
        now[0] += 2.0
        if taken := worth(of, groups, places):
            costs.observe_load("disk", (taken + 2) << 20, 0.001 + ((taken + 2) << 20) / 1e9)
            if taken == LAST:
                break
    assert taken == LAST


def test_a_disk_that_would_win_is_not_held_down_by_probes_of_one_size() -> None:
    now = [0.0]
    costs = CostModel(clock=lambda: now[0])
    costs.observe_prefill(1000, 1000 / TOKENS_A_SECOND)
    of = HitPlanner(ChainCounters(MEDIA, NAMESPACE), costs, {}, time.monotonic)
    groups, places = spans(FULL, FULL, chunks=32, size=1 << 22), [[1] * 32] * 2

    def load(chunks: int) -> None:
        costs.observe_load("disk", 2 * chunks << 22, 0.6 + chunks * 4.5 / 32)

    for _ in range(3):
        load(2)
    taken = []
    for _ in range(100):
        now[0] += 10.0
        taken.append(worth(of, groups, places))
        if taken[-1]:
            load(taken[-1])
    assert taken[40:] == [32] * 60


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
