"""What the engine has to compute before it comes to whoever is asked about."""

from __future__ import annotations

import pytest
from support.processes.clocks import Clock
from support.scheduler.asking import FULL, manager, stored

from kvtier import Stack
from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE, PAGEABLE, LoadRun
from kvtier.vllm.engine_load import EngineLoad
from kvtier.vllm.protocol import Report
from kvtier.vllm.requests import Requests

TOKENS = 1000
"""In a second."""


class Told(CostModel):
    """A cost model that says what it was told."""

    queue = (0.0, 0.0)

    def observe_queue(self, under_way: float, queued: float) -> None:
        super().observe_queue(under_way, queued)
        self.queue = under_way, queued


@pytest.fixture
def costs() -> Told:
    costs = Told(clock=Clock())
    costs.observe_prefill(8 * TOKENS, 8.0)
    return costs


def test_what_was_admitted_waits_for_its_steps_and_is_under_way_then(costs: Told) -> None:
    load = EngineLoad(Requests(), costs, costs._clock)
    load.tell()
    assert costs.queue == (0.0, 0.0)
    load.admitted("a", TOKENS, 3 * TOKENS)
    load.admitted("b", 0, TOKENS)
    load.admitted("is loaded", 0, 0)
    load.tell()
    assert costs.queue == pytest.approx((0.0, 3.0))
    load.stepped({"a": TOKENS, "b": TOKENS, "decodes": 1})
    load.pace.began(2 * TOKENS, 0)
    load.tell()
    assert costs.queue == pytest.approx((2.0, 1.0), abs=0.01)
    load.gone("a")
    load.gone("unknown")
    load.tell()
    assert costs.queue == pytest.approx((2.0, 0.0), abs=0.01)


def test_without_a_cost_model_nobody_is_told() -> None:
    load = EngineLoad(Requests(), None)
    load.admitted("a", 0, TOKENS)
    load.tell()


def test_a_load_that_ends_before_the_engine_would_have_come_to_it_costs_nothing() -> None:
    clock = Clock()
    costs = CostModel(clock=clock)
    costs.observe_prefill(8 * TOKENS, 8.0)
    for _ in range(20):
        costs.observe_load("far", 1 << 24, 4.0)
    costs._link("far").next_probe = float("inf")
    hit = [LoadRun("far", 1, 1 << 24)]
    assert costs.admit(hit, TOKENS) == 0, "four seconds against one"
    costs._link("far").refusing = costs._link(DEVICE).refusing = False
    costs.observe_queue(1.0, 1.5)
    assert costs.admit(hit, TOKENS) == 0, "against 3.5"
    costs._link("far").refusing = costs._link(DEVICE).refusing = False
    costs.observe_queue(1.0, 2.5)
    assert costs.admit(hit, TOKENS) == 1, "against 4.5"


def test_loads_from_cpu_memory_have_their_place_on_the_link(stack: Stack) -> None:
    clock = Clock()
    costs = CostModel(clock=clock)
    asking = manager(stack, FULL, costs=costs, clock=clock)
    ends = asking.keys(4)
    stored(stack, ends)
    before = costs.load_seconds(DEVICE, 0)
    worker_job = asking.manager.prepare_load(list(ends), "a")
    size = sum(stack.namespace.payload_of(key) for key in worker_job.keys)
    assert len(costs._link(DEVICE).in_flight) == 1
    moving = costs.load_seconds(DEVICE, size) - costs.load_seconds(DEVICE, 0)
    assert costs.load_seconds(DEVICE, 0) == pytest.approx(before + moving, rel=0.3)
    clock.now += 1.0
    assert costs.load_seconds(DEVICE, 0) == before, "it has long ended, though nobody has said so"


def test_what_is_loaded_before_memory_is_pinned_says_nothing_of_the_link(stack: Stack) -> None:
    costs = CostModel(clock=Clock())
    asking = manager(stack, FULL, costs=costs, clock=costs._clock)
    ends = asking.keys(4)
    stored(stack, ends)
    worker_job = asking.manager.prepare_load(list(ends), "a")
    before = costs._device.line.at(1 << 20)
    one = Report(1, bytes_moved=1 << 20, busy_seconds=9.0, pinned=False)
    pinned = Report(0, bytes_moved=0)
    assert asking.manager.report(worker_job.number, one.merge(pinned)) is None
    told = costs.stats()
    assert (told[PAGEABLE].samples, told[DEVICE].samples) == (1, 1)
    costs.observe_memory(True)
    assert costs.stats()[DEVICE].samples == 0
    assert costs._device.line.at(1 << 20) == before


def test_stores_tell_of_memory_that_is_not_pinned_before_the_first_load_is_decided(
    stack: Stack,
) -> None:
    costs = CostModel(clock=Clock())
    asking = manager(stack, FULL, costs=costs, clock=costs._clock)
    ends = asking.keys(2)
    asking.manager.on_new_request("a")
    fast = costs.load_seconds(DEVICE, 1 << 30)
    for count, pinned in ((1, False), (2, True)):
        _, worker_job = asking.manager.prepare_store(list(ends)[count - 1 : count], "a")
        asking.manager.report(worker_job.number, Report(1, pinned=pinned))
        seconds = costs.load_seconds(DEVICE, 1 << 30)
        assert seconds == fast if pinned else seconds > 2 * fast


def test_first_tokens_are_timed_by_how_their_prompts_were_got() -> None:
    clock = Clock()
    load = EngineLoad(Requests(), None, clock)
    first = load.first_tokens
    for name in ("computed", "loaded", "engine", "aborted"):
        first.added(name)
    clock.now += 1
    first.loads("loaded")
    for name, start in (("computed", 0), ("loaded", 90), ("engine", 90), ("aborted", 0)):
        load.admitted(name, start, 100)
    load.stepped({"computed": 60, "loaded": 10})
    load.gone("aborted")
    clock.now += 1
    load.stepped({"computed": 40, "engine": 10, "loaded": 1})  # scheduled ahead
    clock.now += 1
    load.ended()
    assert first.take() == [("loaded", 3.0, 100)]
    clock.now += 1
    load.ended()
    assert sorted(first.take()) == [("computed", 4.0, 100), ("engine", 4.0, 100)]
    load.stepped({"computed": 1})
    load.ended()
    assert first.take() == [], "later tokens are not the first"
