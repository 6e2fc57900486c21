"""How much of the time stores get beside an engine that decodes."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.processes.clocks import Clock

from kvtier.device.pacing import EngineSteps, StorePace

STEP_S, STORE_S, TICK_S = 0.006, 0.0013, 0.0001


class Engine:
    """Steps that take longer by a share of the time for which a store runs beside them; and stores
    without end."""

    def __init__(self, harm: float) -> None:
        self.clock = Clock()
        self.pace = StorePace(self.clock)
        self._harm = harm
        self._store: ExitStack | None = None
        self._ends = 0.0
        self.stored = 0

    def run(self, steps: int, requests: int = 32) -> float:
        """So many steps; the mean of what they took, of a step's time without stores."""
        begin = self.clock()
        for _ in range(steps):
            began, left = self.clock(), STEP_S
            while left > 0:
                self._stores()
                beside = self._store is not None
                left -= TICK_S * (1 - self._harm if beside else 1)
                self.clock.now += TICK_S
            self.pace.step(requests, self.clock() - began)
        return (self.clock() - begin) / steps / STEP_S

    def _stores(self) -> None:
        if self._store is not None and self.clock() >= self._ends:
            self._store.close()
            self._store = None
            self.stored += 1
        if self._store is None and not self.pace.delay():
            self._store = ExitStack()
            self._store.enter_context(self.pace.turn())
            self._ends = self.clock() + STORE_S


@pytest.mark.parametrize("harm", [0.05, 0.15, 0.4])
def test_stores_get_less_of_the_time_if_decoding_is_slower_beside_them(harm: float) -> None:
    engine = Engine(harm)
    engine.run(2000)
    assert engine.run(1000) < 1.02
    assert engine.pace.share < 0.5
    before = engine.stored
    engine.run(1000)
    assert engine.stored > before + 10, "and are never given up"


def test_stores_keep_their_pace_if_nobody_notices_them() -> None:
    engine = Engine(0.0)
    engine.run(2000)
    assert engine.pace.share == 1
    assert engine.stored * STORE_S / (2000 * STEP_S) > 0.9


def test_stores_are_fast_again_when_they_cost_nothing_more() -> None:
    engine = Engine(0.3)
    engine.run(2000)
    slowed = engine.pace.share
    engine._harm = 0.0
    engine.run(6000)
    assert slowed < 0.2 < engine.pace.share


def test_nothing_slows_stores_while_prompts_are_computed() -> None:
    engine = Engine(0.3)
    engine.run(2000)
    engine.clock.now += 1.5  # a long prompt
    assert engine.pace.delay() == 0
    engine.run(5, requests=0)
    assert engine.pace.delay() == 0


@pytest.fixture
def slowed() -> Iterator[StorePace]:
    """A pace at which the next store waits for hours."""
    clock = Clock()
    pace = StorePace(clock)
    pace.share = 1 / 64
    pace.step(1, STEP_S)
    with pace.turn():
        clock.now += 0.9
    pace.step(1, STEP_S)
    assert pace.delay() > 50
    yield pace
    pace.stop()


@pytest.mark.parametrize("freed", ["hurry", "stop"])
def test_a_store_waits_no_longer_when_the_engine_does_or_ends(
    slowed: StorePace, freed: str
) -> None:
    done = threading.Event()

    def store() -> None:
        with slowed.turn():
            done.set()

    thread = threading.Thread(target=store)
    thread.start()
    if freed == "hurry":
        slowed.hurry(True)
    else:
        slowed.stop()
    thread.join(60)
    assert done.is_set()


def test_only_steps_that_follow_each_other_are_told_of() -> None:
    clock = Clock()
    steps = EngineSteps(clock)
    told: list[tuple[int, float]] = []
    steps.listener = lambda decoding, seconds: told.append((decoding, round(seconds, 3)))
    for decoding, rest in ((0, 0.001), (3, 0.001), (3, 1.0), (3, 0.001), (0, 0.0)):
        steps.began(decoding)
        clock.now += 0.005
        steps.ended()
        clock.now += rest
    assert told == [(0, 0.006), (3, 0.006), (3, 0.006)]
