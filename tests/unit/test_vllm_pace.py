"""What the cost model is told of the engine's steps."""

from __future__ import annotations

import pytest

from kvtier.core.costs import CostModel
from kvtier.vllm.pace import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def costs(clock: Clock) -> CostModel:
    return CostModel(clock=clock)


def test_a_step_takes_from_its_schedule_to_its_end(clock: Clock, costs: CostModel) -> None:
    pace = Pace(costs, clock)
    pace.began(1000, 0)
    clock.now += 0.5
    pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(0.5)


def test_steps_scheduled_ahead_begin_when_the_one_before_ends(
    clock: Clock, costs: CostModel
) -> None:
    pace = Pace(costs, clock)
    for _ in range(10):
        pace.began(1000, 0)
        pace.began(1000, 0)
        clock.now += 0.5
        pace.ended()
        clock.now += 0.5
        pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(0.5, rel=0.05)


def test_steps_without_prompts_say_nothing(clock: Clock, costs: CostModel) -> None:
    pace = Pace(costs, clock)
    pace.began(0, 0)
    clock.now += 1
    pace.ended()
    pace.ended()
    assert costs.recompute_seconds(0, 1000) is None


def test_steps_that_never_end_are_forgotten(clock: Clock, costs: CostModel) -> None:
    pace = Pace(costs, clock)
    for _ in range(8):
        pace.began(1000, 0)
    clock.now += 1000
    pace.began(1000, 0)
    clock.now += 0.5
    pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(0.5)
