"""Loads that are not worth waiting for any longer, and what becomes of their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.clocks import Clock
from support.scheduler.asking import (
    CHUNK,
    FULL,
    STATE,
    TWO_GROUPS,
    WINDOW,
    AddingManager,
    Asking,
    on_disk,
    small_above_large,
    stored,
)

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.chain.queries import Query
from kvtier.cost.model import CostModel
from kvtier.cost.rates import GRACE_S
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, Outcome
from kvtier.vllm.deferrals import LoadDeadlines
from kvtier.vllm.protocol import Report, WorkerJob


class Gate:
    """Lets reads of a disk pass or holds them, by where they begin."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.passing: set[int] = set()
        self.places: list[int] = []

    def __call__(self, read: Callable[..., int]) -> Callable[..., int]:
        def gated(disk: Disk, fd: int, buffers: Any, at: int) -> int:
            self.places.append(at)
            if at not in self.passing:
                self.open.wait()
            return read(disk, fd, buffers, at)

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(Disk, "readv", gate(Disk.readv))
    yield gate
    gate.open.set()


class Desk(Asking):
    """A manager whose engine computes 1000 tokens a second, above host memory and a folder."""

    def __init__(self, folder: Path, *shapes: Shape) -> None:
        self.clock = Clock(time.monotonic())  # the mover goes by the real one
        costs = CostModel(clock=self.clock)
        costs.observe_prefill(2048, 2.048)
        tiers = small_above_large(folder)
        for tier in tiers["tiers"]:
            tier["load_deadline"] = 600.0
        self.stack = Stack.open(tiers, TWO_GROUPS, costs=costs)
        self.stack.chain._planner._clock = self.clock
        made = AddingManager(self.stack, region="region", ranks=1, costs=costs, clock=self.clock)
        made.shapes = dict(enumerate(shapes))
        super().__init__(made)

    def on_disk(self, chunks: int, first: int = 0) -> dict[bytes, int]:
        ends = self.keys(chunks, first)
        on_disk(self.stack, ends)
        return ends

    def load(self, request: str, ends: dict[bytes, int]) -> WorkerJob:
        tokens = max(ends.values())
        windowed = any(shape.window for shape in self.manager.shapes.values())
        assert self.hit(request, ends, tokens + windowed) == tokens
        worker_job = self.manager.prepare_load(self.needed(ends), request)
        self.manager.scheduled(request)
        return worker_job

    def late(self, request: str, ends: dict[bytes, int]) -> WorkerJob:
        worker_job = self.load(request, ends)
        self.clock.now += 1.0
        assert self.step() == worker_job.number
        return worker_job

    def step(self, tokens: int = 0) -> int | None:
        self.manager.on_schedule_end()
        self.manager.step_began(tokens, 0)
        return self.manager.give_up()

    def end(self, worker_job: WorkerJob, *failures: Outcome) -> str | None:
        report = Report(1, dict(enumerate(failures)), reads_files=False)
        return self.manager.report(worker_job.number, report)

    def lose(self, worker_job: WorkerJob) -> str | None:
        return self.end(worker_job, *[Outcome.CANCELLED] * len(worker_job.keys))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def open_desk(*shapes: Shape) -> Desk:
        desks.append(Desk(tmp_path, *shapes))
        return desks[-1]

    yield open_desk
    for desk in desks:
        desk.stack.close()


SHAPES = pytest.mark.parametrize("shapes", [(FULL,), (FULL, WINDOW), (FULL, STATE)])


@SHAPES
def test_a_load_is_given_up_when_it_has_taken_longer_than_computing(
    opened: Callable[..., Desk], gate: Gate, shapes: tuple[Shape, ...]
) -> None:
    desk = opened(*shapes)
    managed, ends = desk.manager, desk.on_disk(4)
    gate.open.clear()
    worker_job = desk.load("a", ends)
    computing = 4 * CHUNK / 1000
    desk.clock.now += computing + GRACE_S - 0.01
    assert desk.step() is None
    desk.clock.now += 0.02
    assert desk.step(tokens=512) is None, "the engine computes others meanwhile"
    managed.on_new_request("waiting")
    assert desk.step() is None, "somebody else waits for it"
    managed.on_request_finished("waiting")
    assert desk.step() == worker_job.number
    assert desk.step() is None, "once"
    assert desk.lose(worker_job) == "a"
    assert (managed.late_loads, managed.failed_loads) == (1, 0)
    looked_for = desk.stack.chain.chain_stats().misses
    assert desk.hit("a", ends, 4 * CHUNK + 1) == 0, "nothing has come"
    assert desk.stack.chain.chain_stats().misses == looked_for, "it was counted before"
    assert not managed.copying
    gate.open.set()
    assert desk.stack.settle()
    desk.load("b", ends)
    assert managed.source_of(next(iter(ends)), "b") == 0, "what came late lies in host memory"


def test_what_has_come_by_then_is_taken(opened: Callable[..., Desk], gate: Gate) -> None:
    desk = opened(FULL)
    managed = desk.manager
    first = desk.on_disk(2)
    worker_job = desk.load("first", first)
    assert desk.stack.settle()
    desk.end(worker_job)
    gate.passing.update(gate.places)
    desk.stack.chain.tiers[0].forget([BlockKey(key) for key in first])
    ends = first | {key: end + 2 * CHUNK for key, end in desk.on_disk(2, first=50).items()}
    gate.open.clear()
    worker_job = desk.load("a", ends)
    host = desk.stack.chain.tiers[0]
    keys = [BlockKey(key) for key in ends]
    while list(host.arrived(keys)) != keys[:2]:
        pass
    assert managed.costs is not None
    managed.costs._link("nvme").next_probe = float("inf")
    desk.clock.now += 2.0
    assert desk.step() == worker_job.number
    assert desk.lose(worker_job) == "a"
    assert desk.hit("a", ends, 4 * CHUNK) == 2 * CHUNK
    worker_job = managed.prepare_load(list(first), "a")
    desk.clock.now += 2.0
    number = desk.step()
    assert number in (None, worker_job.number), "its move is still late, though all of it has come"
    assert desk.end(worker_job) is None
    gate.open.set()
    assert desk.stack.settle()
    assert managed.late_loads == 1
    assert desk.hit("a", ends, 4 * CHUNK) == 4 * CHUNK, "preempted, it may have all of it"


def test_one_is_given_up_at_a_time(opened: Callable[..., Desk], gate: Gate) -> None:
    desk = opened(FULL)
    prompts = [desk.on_disk(2, first=10 * at) for at in range(3)]
    gate.open.clear()
    worker_jobs = [desk.load(str(at), ends) for at, ends in enumerate(prompts)]
    desk.clock.now += 1.0
    for at, worker_job in enumerate(worker_jobs):
        assert desk.step() == worker_job.number
        assert desk.step() is None, "it will be computed first"
        assert desk.lose(worker_job) == str(at)
    assert desk.step() is None
    assert desk.manager.late_loads == 3


def test_one_that_does_not_end_though_it_was_given_up_keeps_no_other_from_it(
    opened: Callable[..., Desk], gate: Gate
) -> None:
    """A read straight into the device that has begun is waited for."""
    desk = opened(FULL)
    prompts = [desk.on_disk(2, first=10 * at) for at in range(2)]
    gate.open.clear()
    first, second = [desk.load(str(at), ends) for at, ends in enumerate(prompts)]
    desk.clock.now += 1.0
    assert desk.step() == first.number
    desk.clock.now += 2 * CHUNK / 1000 - 0.01
    assert desk.step() is None
    desk.clock.now += 0.02
    assert desk.step() == second.number
    assert desk.lose(first) == "0"
    assert desk.lose(second) == "1"
    assert desk.manager.late_loads == 2


def test_one_that_fails_when_it_is_given_up_has_failed(
    opened: Callable[..., Desk], gate: Gate
) -> None:
    desk = opened(FULL)
    managed, ends = desk.manager, desk.on_disk(2)
    gate.open.clear()
    worker_job = desk.late("a", ends)
    assert desk.end(worker_job, Outcome.IO_ERROR, Outcome.CANCELLED)
    assert (managed.late_loads, managed.failed_loads) == (0, 1)
    gate.open.set()
    assert desk.stack.settle()
    assert desk.hit("a", ends, 2 * CHUNK) == 0, "it is offered nothing any more"


def test_one_that_was_cancelled_unasked_has_failed(opened: Callable[..., Desk]) -> None:
    """Its copier has closed, say: it would be tried for ever."""
    desk = opened(FULL)
    ends = desk.keys(2)
    stored(desk.stack, ends)
    assert desk.lose(desk.load("a", ends)) == "a"
    assert (desk.manager.late_loads, desk.manager.failed_loads) == (0, 1)
    assert desk.hit("a", ends, 2 * CHUNK) == 0
    assert desk.hit("b", ends, 2 * CHUNK) == 2 * CHUNK


def test_one_that_ends_well_after_all_is_not_late(opened: Callable[..., Desk], gate: Gate) -> None:
    desk = opened(FULL)
    managed, ends = desk.manager, desk.on_disk(2)
    gate.open.clear()
    worker_job = desk.late("a", ends)
    gate.open.set()
    assert desk.stack.settle()
    assert desk.end(worker_job) is None
    assert (managed.late_loads, managed.failed_loads) == (0, 0)
    gate.open.clear()
    desk.late("b", desk.on_disk(2, first=50))  # the next may be given up again


def test_loads_from_host_memory_are_never_given_up(opened: Callable[..., Desk]) -> None:
    desk = opened(FULL)
    ends = desk.keys(4)
    stored(desk.stack, ends)
    worker_job = desk.load("a", ends)
    desk.clock.now += 100.0
    assert desk.step() is None
    assert desk.end(worker_job) is None


def test_only_what_comes_from_below_counts(opened: Callable[..., Desk], gate: Gate) -> None:
    """The rest of its prompt is there, and would be there for it, too, without the load."""
    desk = opened(FULL)
    ends = desk.keys(8)
    stored(desk.stack, ends)
    assert desk.stack.settle()
    desk.stack.chain.tiers[0].forget([BlockKey(key) for key in list(ends)[6:7]])
    gate.open.clear()
    worker_job = desk.load("a", ends)
    desk.clock.now += 2 * CHUNK / 1000 + GRACE_S + 0.01
    assert desk.step() == worker_job.number
    assert desk.lose(worker_job) == "a"
    assert desk.hit("a", ends, 8 * CHUNK) == 6 * CHUNK


def test_reads_of_files_that_are_given_up_tell_how_slow_these_are(
    opened: Callable[..., Desk],
) -> None:
    desk = opened(FULL)
    managed, prompts = desk.manager, [desk.on_disk(4, first=10 * at) for at in range(2)]
    disk = desk.stack.chain.tiers[1]
    desk.stack.chain.read_directly(True)
    worker_job = desk.load("quick", desk.on_disk(4, first=50))
    failures = dict.fromkeys(worker_job.files, Outcome.CANCELLED)
    managed.report(worker_job.number, Report(1, failures, read_seconds=1e-6))
    assert managed.costs is not None
    assert managed.costs.stats()["nvme direct"].samples == 0, "it says nothing of how fast they are"
    worker_job = desk.load("a", prompts[0])
    assert sorted(worker_job.files) == [0, 1, 2, 3]
    desk.clock.now += 2.0
    assert desk.step() == worker_job.number
    failures = dict.fromkeys(worker_job.files, Outcome.CANCELLED)
    assert managed.report(worker_job.number, Report(1, failures, read_seconds=2.0)) == "a"
    assert managed.late_loads == 1
    assert disk.stats().pinned == 0
    assert desk.hit("b", prompts[1], 4 * CHUNK) == 0, "it would take longer than computing"
    desk.clock.now += 600.0
    assert desk.hit("c", prompts[0], 4 * CHUNK) > 0, "no block is blamed, and a probe is due"


@SHAPES
def test_nobody_joins_a_load_that_hangs(
    opened: Callable[..., Desk], gate: Gate, shapes: tuple[Shape, ...]
) -> None:
    desk = opened(*shapes)
    ends = desk.on_disk(4)
    tokens = 4 * CHUNK + 1
    gate.open.clear()
    desk.load("a", ends)
    assert desk.hit("b", ends, tokens) == 4 * CHUNK, "it is on its way"
    desk.clock.now += 5.0
    desk.step()
    assert desk.manager.costs is not None
    desk.manager.costs._link("nvme").next_probe = float("inf")
    assert desk.hit("b", ends, tokens) == 0, "it hangs"
    assert desk.hit("c", ends, tokens) == 0
    gate.open.set()
    assert desk.stack.settle()
    assert desk.hit("c", ends, tokens) == 4 * CHUNK


def test_one_that_was_to_take_long_has_longer() -> None:
    """It was taken because it spares those behind it."""
    clock, patience = clock_and_deadlines()
    patience.began(1, clock.now + 5.0, 0, 1000)
    clock.now += 9.9
    assert patience.give_up() is None
    clock.now += 0.3
    assert patience.give_up() == 1
    assert not patience.ended(7)
    assert patience.ended(1)
    assert patience.give_up() is None


@pytest.mark.parametrize(
    ("answered", "busy", "seconds"), [(True, False, 0.4), (False, False, 0.07), (True, True, 0.4)]
)
def test_other_machines_that_stand_still_are_not_waited_for(
    answered: bool, busy: bool, seconds: float
) -> None:
    """Whatever the engine computes."""
    clock, patience = clock_and_deadlines()
    query = Query(clock.now, left=not answered)
    patience.began(1, clock.now + 0.2, 0, 1000, left=lambda: 8, query=query)
    clock.now += seconds - 0.01
    assert patience.give_up() is None
    clock.now += 0.02
    assert patience.give_up(busy=busy) == 1


def test_other_machines_that_stop_amid_a_load_are_not_waited_for() -> None:
    """As long as something comes, a load has the time of all others; for one of which nothing has
    come yet, what comes of others counts, as they come in turns."""
    clock, patience = clock_and_deadlines()
    left = [32, 32]
    patience.began(0, clock.now + 0.4, 0, 1000, left=lambda: left[0])
    patience.began(1, clock.now + 0.8, 0, 1000, left=lambda: left[1])
    for _ in range(14):
        clock.now += 0.03
        left[0] -= 2
        assert patience.give_up() is None
    clock.now += 0.11  # a few times what lay between
    assert patience.give_up() is None
    clock.now += 0.02
    assert patience.give_up(busy=True) == 0
    assert patience.give_up(busy=True) == 1
    patience.began(2, clock.now + 9.0, 0, 1000, left=lambda: 32)
    clock.now += 0.13
    assert patience.give_up(busy=True) == 2, "however long it should take"


def test_what_comes_in_large_pieces_has_time_between_them() -> None:
    clock, patience = clock_and_deadlines()
    left = [8]
    patience.began(1, clock.now + 0.6, 0, 1000, left=lambda: left[0])
    clock.now += 0.15
    left[0] = 6
    assert patience.give_up() is None
    clock.now += 0.59
    assert patience.give_up() is None
    clock.now += 0.02
    assert patience.give_up() == 1


def clock_and_deadlines() -> tuple[Clock, LoadDeadlines]:
    """Where computing a thousand tokens takes a second."""
    clock = Clock(time.monotonic())
    costs = CostModel(clock=clock)
    costs.observe_prefill(2000, 2.0)
    return clock, LoadDeadlines(costs, clock, 10.0)


@pytest.mark.parametrize("costs", [None, CostModel()])
def test_who_does_not_know_how_long_computing_takes_waits(costs: CostModel | None) -> None:
    clock = Clock(time.monotonic())
    patience = LoadDeadlines(costs, clock, 10.0)
    patience.began(1, 0.0, 0, 1000)
    clock.now += 1e6
    assert patience.give_up() is None
