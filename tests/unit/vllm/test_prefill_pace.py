"""What the cost model is told of the engine's steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.core.costs.model import CostModel
from kvtier.vllm.scheduler.prefill_pace import Pace, prompt_tokens


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


def test_a_step_that_is_lost_is_taken_for_no_other(clock: Clock, costs: CostModel) -> None:
    pace = Pace(costs, clock)
    pace.began(1000, 0)
    pace.lost()
    clock.now += 1000
    pace.ended()
    assert costs.recompute_seconds(0, 1000) is None
    pace.began(1000, 0)
    clock.now += 0.5
    pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("new", "cached", "said"),
    [
        ([], [(1, 500)] * 40, (0, 0)),
        ([], [(4, 500)] * 40, (0, 0)),
        ([(32, 0)], [], (0, 0)),
        ([(33, 0)], [], (33, 0)),
        ([(31, 64), (32, 64)], [], (32, 64)),
        ([(100, 50)], [(1, 500)] * 40, (100, 50)),
        ([], [(512, 1024), (1, 9)], (512, 1024)),
        ([(100, 0)], [(300, 200)], (400, 75)),
    ],
    ids=["decoded", "guessed ahead", "few", "enough", "one of two", "new", "going on", "several"],
)
def test_what_of_a_step_is_of_prompts(
    new: list[tuple[int, int]], cached: list[tuple[int, int]], said: tuple[int, int]
) -> None:
    """Requests by how many tokens they compute and have. Several count as one that takes as many
    steps of attention: 100 * 50 + 300 * 350 is 400 * (75 + 200)."""
    before = {f"{at}": each for at, each in enumerate([*new, *cached])}
    counts = {name: count for name, (count, _) in before.items()}
    names = list(before)
    scheduled = SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before[name][1])
            for name in names[: len(new)]
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names[len(new) :],
            num_computed_tokens=[before[name][1] for name in names[len(new) :]],
        ),
    )
    assert prompt_tokens(scheduled) == said
