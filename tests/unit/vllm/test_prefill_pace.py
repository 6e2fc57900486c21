"""What the cost model is told of the engine's steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.processes.clocks import Clock

from kvtier.cost.model import CostModel
from kvtier.vllm.engine_load import StepTimes, prompt_tokens


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def costs(clock: Clock) -> CostModel:
    return CostModel(clock=clock)


def test_a_step_takes_from_its_schedule_to_its_end(clock: Clock, costs: CostModel) -> None:
    pace = StepTimes(costs, clock)
    pace.began(1000, 0)
    clock.now += 0.5
    pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(0.5)


def test_steps_scheduled_ahead_begin_when_the_one_before_ends(
    clock: Clock, costs: CostModel
) -> None:
    pace = StepTimes(costs, clock)
    for _ in range(10):
        pace.began(1000, 0)
        pace.began(1000, 0)
        clock.now += 0.5
        pace.ended()
        clock.now += 0.5
        pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(0.5, rel=0.05)


def test_steps_without_prompts_say_nothing(clock: Clock, costs: CostModel) -> None:
    pace = StepTimes(costs, clock)
    pace.began(0, 0)
    clock.now += 1
    pace.ended()
    pace.ended()
    assert costs.recompute_seconds(0, 1000) is None


def test_steps_that_never_end_are_forgotten(clock: Clock, costs: CostModel) -> None:
    pace = StepTimes(costs, clock)
    for _ in range(8):
        pace.began(1000, 0)
    clock.now += 1000
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


def known(clock: Clock, costs: CostModel) -> StepTimes:
    """A thousand tokens a second."""
    pace = StepTimes(costs, clock)
    for _ in range(20):
        pace.began(1000, 0)
        clock.now += 1.0
        pace.ended()
    return pace


@pytest.mark.parametrize("before", [0, 1000], ids=["decoding", "a prompt"])
def test_word_that_comes_late_makes_no_step_look_short(
    clock: Clock, costs: CostModel, before: int
) -> None:
    """The thread was launching the next step for 0.9 s after this one's end."""
    pace = known(clock, costs)
    for _ in range(3):
        pace.began(before, 0)
        pace.began(1000, 0)
        clock.now += before / 1000 + 0.9
        pace.ended()
        clock.now += 0.1
        pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(1.0, rel=0.05)


def test_an_engine_that_becomes_slow_is_found_out_though_steps_are_scheduled_ahead(
    clock: Clock, costs: CostModel
) -> None:
    pace = known(clock, costs)
    pace.began(1000, 0)
    for _ in range(24):
        pace.began(1000, 0)
        clock.now += 4.0
        pace.ended()
    assert costs.recompute_seconds(0, 1000) == pytest.approx(4.0, rel=0.05)


def test_how_long_the_device_is_still_at_what_has_begun(clock: Clock, costs: CostModel) -> None:
    assert StepTimes(costs, clock).under_way() == 0.0
    unknown = StepTimes(costs, clock)
    unknown.began(1000, 0)
    assert unknown.under_way() == 0.0
    pace = known(clock, costs)
    pace.began(1000, 0)
    clock.now += 0.25
    pace.began(500, 0)
    assert pace.under_way() == pytest.approx(1.25, abs=0.02)
    clock.now += 0.75
    pace.ended()
    clock.now += 0.25
    assert pace.under_way() == pytest.approx(0.25, abs=0.02)
    clock.now += 100.0
    assert pace.under_way() == 0.0
