"""The parts that eviction policies are made of, and the replay of traces."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.eviction.reference_policies import new_policy
from benchmarks.eviction.replay import replay, replay_belady
from kvtier.cli.trace_simulation import Request, read_trace
from kvtier.errors import ConfigError
from kvtier.eviction import create_policy
from kvtier.eviction.adaptive import (
    KINDS,
    MARK_MAX,
    RESTORED,
    SHARED,
    TURN_MAX,
    Seen,
    added_kind,
    conclude,
    pause_level,
    pause_of,
    shared_kind,
)
from kvtier.eviction.forecast import AGES, SAMPLED_IN, Forecast, History, Runs, age_steps


def ages(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def step(age: float) -> int:
    return int(age_steps(ages(age))[0])


class TestForecast:
    def test_without_knowledge_the_older_are_worth_less(self) -> None:
        forecast = Forecast(2, [1] * 2)
        rates = forecast.rate(np.zeros(5, dtype=np.uint8), ages(0.5, 2, 30, 600, 20_000))
        assert all(rates[:-1] > rates[1:])

    def test_what_returns_after_a_minute_is_worth_more_shortly_before(self) -> None:
        forecast = Forecast(2, [1])
        for _ in range(2000):
            forecast.reused.note(0, 60.0)
        forecast.refresh(np.zeros((2, AGES)))
        early, shortly_before, late = forecast.rate(
            np.zeros(3, dtype=np.uint8), ages(1.0, 45.0, 600.0)
        )
        assert shortly_before > early > late

    def test_a_kind_that_is_given_up_is_worth_less_than_one_that_returns(self) -> None:
        forecast = Forecast(2, [1] * 2)
        for _ in range(2000):
            forecast.reused.note(0, 60.0)
            forecast.lost.note(1, 600.0)
        forecast.refresh(np.zeros((2, AGES)))
        returning, leaving = forecast.rate(np.array([0, 1], dtype=np.uint8), ages(10.0, 10.0))
        assert returning > 5 * leaving

    def test_those_still_waiting_count(self) -> None:
        waiting = np.zeros((1, AGES))
        waiting[0, step(600.0)] = 10_000
        quick, patient = Forecast(1, [1]), Forecast(1, [1])
        for forecast, crowd in ((quick, waiting * 0), (patient, waiting)):
            for _ in range(1000):
                forecast.reused.note(0, 60.0)
            forecast.refresh(crowd)
        kind = np.zeros(1, dtype=np.uint8)
        assert quick.rate(kind, ages(10.0)) > 3 * patient.rate(kind, ages(10.0))

    def test_few_uses_say_less_of_their_very_age_than_many(self) -> None:
        few, many = Forecast(2, [1]), Forecast(2, [1])
        for forecast, uses in ((few, 20), (many, 2000)):
            for _ in range(uses):
                forecast.reused.note(1, 60.0)
            forecast.refresh(np.zeros((2, AGES)))
        kind = np.ones(1, dtype=np.uint8)
        sharpness = [
            float((each.rate(kind, ages(55.0)) / each.rate(kind, ages(15.0)))[0])
            for each in (few, many)
        ]
        assert sharpness[1] > 1.65 * sharpness[0]

    def test_what_is_worth_nothing_is_worth_nothing(self) -> None:
        assert Forecast(3, [1] * 2).rate(np.array([3], dtype=np.uint8), ages(1.0)) == 0.0


class TestHistory:
    def test_a_use_ends_one_wait_and_begins_the_next(self) -> None:
        forecast = Forecast(3, [1] * 3)
        history = History(forecast)
        ((_, cell, tag),) = history.sample([SAMPLED_IN * 5])
        history.write(cell, tag, 0.0, 1, 4, 0)
        history.write(cell, tag, 60.0, 2, 5, 0)
        assert forecast.reused.count()[1, step(60.0)] == 1.0
        waiting = history.waiting(70.0, 3)
        assert waiting[2, step(10.0)] == waiting.sum() == 1.0
        assert (history.tags[cell], history.marks[cell]) == (tag, 5)

    def test_another_key_in_the_same_cell_ends_a_wait_unanswered(self) -> None:
        forecast = Forecast(1, [1])
        history = History(forecast)
        first, second = SAMPLED_IN * 5, SAMPLED_IN * (5 + history.cells)
        ((_, cell, _), (_, same_cell, _)) = history.sample([first, second])
        assert cell == same_cell
        history.write(cell, first, 0.0, 0, 0, 0)
        history.write(cell, second, 9.0, 0, 0, 0)
        assert forecast.lost.count()[0, step(9.0)] == 1.0

    def test_it_grows_seldom_and_remembers(self) -> None:
        """As of a tier that has more slots from time to time."""
        forecast = Forecast(1, [1])
        history = History(forecast)
        tags = [SAMPLED_IN * number for number in range(1, 3000)]
        for _, cell, tag in history.sample(tags):
            history.write(cell, tag, float(tag), 0, tag % 251, tag % 3)
        before, sizes = history.cells, set()
        for slots in range(before // 2, 3 * before // 2, before // 32):
            history.resize(slots)
            sizes.add(history.cells)
        assert len(sizes) <= 4
        assert min(sizes) == before
        assert 3 * before <= 2 * slots + before // 16 <= history.cells + before // 16
        assert forecast.memory == history.cells // 2
        found = {tag: cell for _, cell, tag in history.sample(tags)}
        kept = [
            (history.tags[cell], history.times[cell], history.marks[cell], history.rests[cell])
            for cell in found.values()
        ]
        assert kept == [(tag, float(tag), tag % 251, tag % 3) for tag in found]

    def test_a_large_table_is_counted_in_turns(self) -> None:
        history = History(Forecast(1, [1]))
        half = history.cells
        history.resize(half)
        for cell in (0, half, half + 1):
            history.write(cell, SAMPLED_IN, 0.0, 0, 0, 0)
        assert [history.waiting(9.0, 1).sum() for _ in range(4)] == [2.0, 4.0, 2.0, 4.0]

    def test_no_part_of_a_large_table_is_too_small_to_stand_for_it(self) -> None:
        history = History(Forecast(2, [1] * 2))
        history.resize(history.cells + 3)
        for cell in range(history.cells):
            history.write(cell, SAMPLED_IN, 0.0, int(cell == history.cells - 1), 0, 0)
        seen = [history.waiting(9.0, 2)[1].sum() for _ in range(6)]
        assert sorted(seen)[:4] == [0.0] * 4, "the last one is counted once in three turns"
        assert max(seen) == 3.0, "and is not taken for all"

    def test_what_has_waited_for_long_counts_less(self) -> None:
        """As old uses do: else a large table learns late that the workload has changed."""
        history = History(Forecast(1, [1]))
        history.write(0, SAMPLED_IN, 0.0, 0, 0, 0)
        history.write(1, SAMPLED_IN, 100.0, 0, 0, 0)
        counts = [history.waiting(100.0 + turn, 1) for turn in range(100)]
        assert counts[0].sum() == 2.0
        assert 0.9 < counts[11][0, step(11.0)] / 0.5 < 1.1
        assert counts[11][0, step(111.0)] < 0.01

    def test_only_a_sample_is_watched(self) -> None:
        dice = random.Random(3)
        watched = History(Forecast(1, [1])).sample([dice.getrandbits(32) for _ in range(4000)])
        assert 900 < len(watched) < 1100


class TestRuns:
    def test_room_for_more_is_made_a_little_at_a_time(self) -> None:
        """A quarter of millions kept a request waiting."""
        runs = Runs()
        runs._reserve(200_000)
        runs._free.clear()
        runs._reserve(1)
        assert 0 < len(runs._free) < 20_000
        runs._reserve(100_000)
        assert len(runs._free) >= 100_000


class TestKinds:
    @pytest.mark.parametrize(
        ("seen", "fresh", "turn", "forked"),
        [
            (Seen(mark=2, rest=2, again=True, pause=0), 2, 3, False),  # after the end of the last
            (Seen(mark=2, rest=0, again=False, pause=0), 2, 2, False),  # the rest of the same
            (Seen(mark=2, rest=3, again=True, pause=0), 2, 0, True),  # it leaves another halfway
            (Seen(mark=0, rest=3, again=True, pause=0), 0, 1, False),  # the same request again
            (Seen(TURN_MAX, rest=0, again=True, pause=0), 1, TURN_MAX, False),  # a late turn
        ],
    )
    def test_turns_and_forks_are_told_apart(
        self, seen: Seen, fresh: int, turn: int, forked: bool
    ) -> None:
        story = conclude(seen, fresh, 20)
        assert (story.turn, story.forked) == (turn, forked)

    def test_the_rest_of_a_first_request_is_as_its_beginning(self) -> None:
        assert conclude(Seen(mark=0, rest=0, again=False, pause=0), 2, 20) == conclude(None, 2, 20)

    def test_a_beginning_that_many_share_says_nothing_of_a_first_request(self) -> None:
        few, many = (conclude(Seen(SHARED + uses, 9, True, 0), 2, 9) for uses in (31, 32))
        assert few.kind == conclude(Seen(0, 9, True, 0), 2, 9).kind
        assert many == conclude(None, 2, 9)

    def test_no_kind_is_two_things(self) -> None:
        pauses = {pause_level(float(seconds)) for seconds in range(200)}
        turns = [
            conclude(Seen(turn, 0, True, pause), new, 9).kind
            for turn in range(33)
            for new in (0, 9)
            for pause in pauses
        ]
        sorts = [
            {conclude(None, length, length).kind for length in range(1, 2000)},
            set(turns),
            set(map(added_kind, turns)),
            {conclude(Seen(0, 9, True, 0), 2, 9).kind},
            {shared_kind(mark) for mark in range(SHARED, MARK_MAX + 1)},
            {RESTORED},
        ]
        assert sorted(kind for sort in sorts for kind in sort) == list(range(KINDS))
        assert sorts[2] == set(map(added_kind, sorts[1]))
        for sort in (sorts[0], *sorts[3:]):
            assert set(map(added_kind, sort)) == sort

    def test_a_turn_after_a_longer_pause_is_of_another_kind_and_so_is_the_rest_of_it(self) -> None:
        soon, late = (Seen(2, 0, True, pause_level(pause)) for pause in (3.0, 60.0))
        assert conclude(soon, 2, 9).kind != conclude(late, 2, 9).kind
        for seen in (soon, late):
            kind = conclude(seen, 2, 9).kind
            assert pause_of(kind) == pause_of(added_kind(kind)) == seen.pause

    def test_what_is_shared_by_more_is_of_another_kind(self) -> None:
        assert len({shared_kind(SHARED + uses) for uses in (0, 1, 4, 20, 127)}) == 5


class TestReplay:
    def test_a_hit_counts_only_while_the_prefix_is_unbroken(self) -> None:
        policy = create_policy("lru")
        trace = [
            Request(0.0, (1, 2, 3)),
            Request(1.0, (9, 2, 3)),
            Request(2.0, (1, 2, 4)),
            Request(3.0, (1, 2, 4)),
        ]
        result = replay(trace, policy, 10)
        assert (result.references, result.hits, result.evictions) == (12, 5, 0)
        assert replay_belady(trace, 10).hits == 5
        assert replay(trace[:2], create_policy("lru"), 4).evictions == 0, "there is room for one"

    def test_only_what_comes_after_the_warm_up_counts(self) -> None:
        trace = [Request(0.0, (1, 2)), Request(1.0, (1, 2))]
        result = replay(trace, create_policy("lru"), 10, count_from=1)
        assert (result.references, result.hits, result.percent) == (2, 2, 100.0)
        assert replay(trace, create_policy("lru"), 10, count_from=2).percent == 0.0

    def test_a_request_larger_than_the_tier_is_stored_in_part(self) -> None:
        trace = [Request(float(turn), tuple(range(30))) for turn in range(2)]
        assert replay(trace, create_policy("lru"), 10).hits == 10

    def test_a_capacity_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one block"):
            replay([], create_policy("lru"), 0)

    def test_no_policy_passes_the_bound(self) -> None:
        dice = random.Random(5)
        trace = []
        for now in range(2000):
            first = 20 * int(dice.paretovariate(0.8)) % 4000
            trace.append(Request(float(now), tuple(range(first, first + dice.randint(1, 20)))))
        for capacity in (50, 200, 1000):
            bound = replay_belady(trace, capacity)
            for name in ("adaptive", "arc", "lru", "s3fifo"):
                result = replay(trace, new_policy(name), capacity)
                assert result.references == bound.references
                assert result.hits <= bound.hits

    @given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
    def test_belady_is_as_good_as_the_best_of_all_choices(
        self, blocks: list[int], capacity: int
    ) -> None:
        best = {frozenset[int](): 0}
        for block in blocks:
            after: dict[frozenset[int], int] = {}
            for kept, hits in best.items():
                choices = [kept]
                if block not in kept:
                    rests = [kept - {gone} for gone in kept] if len(kept) == capacity else [kept]
                    choices += [rest | {block} for rest in rests]
                for choice in choices:
                    after[choice] = max(after.get(choice, 0), hits + (block in kept))
            best = after
        trace = [Request(float(at), (block,)) for at, block in enumerate(blocks)]
        assert replay_belady(trace, capacity).hits == max(best.values())

    def test_belady_knows_the_future(self) -> None:
        trace = [Request(float(turn), (block,)) for turn, block in enumerate((1, 2, 3, 1, 2, 3))]
        assert replay_belady(trace, 2).hits == 2
        assert replay(trace, create_policy("lru"), 2).hits == 0


class TestTrace:
    def test_it_is_read_in_order_of_time(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.jsonl"
        file.write_text(
            '{"timestamp": 2000, "input_length": 9, "hash_ids": [0, 2, 2]}\n\n'
            '{"timestamp": 500, "hash_ids": [0, 3]}\n{"timestamp": 3000, "hash_ids": []}\n'
        )
        assert read_trace(file) == [
            Request(0.5, (0, 3)),
            Request(2.0, (0, 2)),
            Request(3.0, ()),
        ]

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "holds no request"),
            ('{"timestamp": 1}\n', "trace.jsonl:1: no request of a trace: .*hash_ids"),
            ('{"timestamp": 1, "hash_ids": [1]}\nnonsense\n', "trace.jsonl:2: no request"),
            ('{"timestamp": 1, "hash_ids": [-1]}\n', "out of range"),
            ('{"timestamp": 1, "hash_ids": [99999999999999999999]}\n', "trace.jsonl:1"),
            (f'{{"timestamp": 1, "hash_ids": [1, {2**63}]}}\n', "out of range"),
            (f'{{"timestamp": 1, "other": {"[" * 9999}', "trace.jsonl:1: no request"),
        ],
    )
    def test_what_is_no_trace_is_explained(self, tmp_path: Path, text: str, problem: str) -> None:
        file = tmp_path / "trace.jsonl"
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_trace(file)

    def test_a_missing_file_is_explained(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            read_trace(tmp_path / "none.jsonl")
