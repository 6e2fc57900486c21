"""What defines the default policy."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest
from support.scheduler.eviction_requests import chats, keys

from benchmarks.eviction.reference_policies import new_policy
from benchmarks.eviction.replay import replay
from kvtier.cli.trace_simulation import Request
from kvtier.eviction import create_policy
from kvtier.eviction.adaptive import MARK_MAX, SHARED, Adaptive, shared_kind
from kvtier.eviction.policy import fingerprint


class TestAdaptive:
    def test_it_begins_as_lru(self) -> None:
        policy, lru = create_policy("adaptive", 100), create_policy("lru", 100)
        for turn in range(20):
            for each in (policy, lru):
                each.use(range(5 * turn, 5 * turn + 5), keys(5 * turn, 5), 3.0 * turn)
        assert policy.evict(60) == lru.evict(60)

    def test_a_block_is_likelier_to_be_used_the_younger_it_is_and_the_longer_one_waits(
        self,
    ) -> None:
        policy = create_policy("adaptive", 8)
        policy.use([0], keys(0, 1), 0.0)
        policy.use([1], keys(1, 1), 100.0)
        old, young = policy.chances([0, 1], 10.0, 101.0)
        assert 0.0 < old < young < 1.0
        assert policy.chances([0], 100.0, 101.0)[0] > old

    @pytest.mark.slow
    def test_it_keeps_conversations_rather_than_what_nobody_comes_back_to(self) -> None:
        requests = chats(random.Random(1), 1500)
        once = [
            Request(number + 0.5, tuple(range(10**6 + 40 * number, 10**6 + 40 * number + 40)))
            for number in range(1500)
        ]
        trace = sorted([*requests, *once])
        warm = len(trace) // 2
        best = replay(trace, create_policy("adaptive"), 1000, warm).percent
        for name in ("lru", "s3fifo", "arc"):
            assert best > replay(trace, new_policy(name), 1000, warm).percent + 5.0

    def test_it_keeps_a_part_of_a_ring_that_does_not_fit(self) -> None:
        ring = [tuple(range(10 * i, 10 * i + 10)) for i in range(120)]
        trace = [Request(float(turn), ring[turn % 120]) for turn in range(3000)]
        assert replay(trace, create_policy("lru"), 1000, 1000).hits == 0
        assert replay(trace, create_policy("adaptive"), 1000, 1000).percent > 60.0

    def test_what_a_turn_leaves_behind_goes_first(self) -> None:
        policy = create_policy("adaptive", 20)
        policy.use([10, 11], keys(50, 2), 0.5)
        policy.use([0, 1, 2, 3], keys(0, 4), 1.0)
        policy.use([0, 1, 2], keys(0, 3), 60.0, ahead=2)
        policy.use([4, 5], keys(4, 2), 61.0, after=2)
        assert policy.evict(1) == [3]

    def test_what_a_long_answer_goes_on_from_stays_as_young_as_the_answer(self) -> None:
        policy = create_policy("adaptive", 20)
        policy.use([0, 1], keys(0, 2), 0.0)
        policy.use([0, 1], keys(0, 2), 100.0, ahead=1)
        policy.use([2], keys(2, 1), 101.0, after=1)
        policy.use([10, 11], keys(50, 2), 140.0)
        policy.use([10, 11], keys(50, 2), 150.0)
        for answer in range(3, 8):
            policy.use([answer], keys(answer, 1), 100.0 + 30.0 * answer, after=answer - 1)
        assert set(policy.evict(2)) == {10, 11}
        assert policy.evict(8) == [7, 6, 5, 4, 3, 2, 1, 0]

    def test_what_a_turn_adds_leaves_before_what_it_came_back_to(self) -> None:
        policy = create_policy("adaptive", 1000)
        for number in range(400):  # a document that everyone asks something else about
            slots = [*policy.evict(2)] if len(policy) > 900 else [20 + 2 * number, 21 + 2 * number]
            if number:
                policy.use(range(20), keys(0, 20), 5.0 * number, ahead=2)
                policy.use(slots, keys(1000 + 2 * number, 2), 5.0 * number + 1, after=19)
            else:
                policy.use([*range(20), *slots], [*keys(0, 20), *keys(1000, 2)], 0.0)
        questions = len(policy) - 20
        assert set(policy.evict(questions)).isdisjoint(range(20))

    def test_a_prefix_that_requests_share_does_not_leave_with_one_of_them(self) -> None:
        policy = create_policy("adaptive", 100)
        policy.use(range(10), keys(0, 10), 1.0)
        for turn in range(1, 6):
            policy.use([0, 1], keys(0, 2), 10.0 * turn, ahead=8)
            first = 2 + 8 * turn
            policy.use(range(first, first + 8), keys(100 * turn, 8), 10.0 * turn, after=1)
        assert set(policy.evict(len(policy) - 2)).isdisjoint({0, 1})

    def test_it_knows_a_conversation_again_whose_blocks_were_all_evicted(self) -> None:
        policy = Adaptive(100)
        policy.use(range(40), keys(0, 40), 1.0)
        policy.evict(40)
        policy.use(range(41), keys(0, 41), 60.0)
        assert policy._marks[40] == 1, "the first turn after the first request"

    def test_where_requests_part_is_marked_up_to_there_and_uses_of_it_are_counted(self) -> None:
        policy = Adaptive(100)
        runs = policy._runs
        policy.use(range(10), keys(0, 10), 1.0)
        for number in range(1, 4):
            first = 10 * number
            policy.use([0, 1, 2], keys(0, 3), 10.0 * number, ahead=4)
            assert policy._marks[2] == (0 if number == 1 else SHARED + number - 1), "undecided"
            after = 10.0 * number + 1
            policy.use(range(first, first + 4), keys(100 * number, 4), after, after=2)
            assert [runs.kind[runs.run_of[slot]] for slot in range(3)] == [
                shared_kind(SHARED + number - 1)
            ] * 3
        assert list(policy._marks[:4]) == [SHARED + 2] * 3 + [0]
        assert not any(policy._marks[10:14])
        for _ in range(MARK_MAX):
            policy.use([0, 1, 2], keys(0, 3), 50.0)
        assert policy._marks[0] == MARK_MAX

    def test_one_watched_block_tells_how_far_what_was_shared_goes(self) -> None:
        """Though no other block of it is remembered: of 40 one in four is watched."""
        policy = Adaptive(100)
        policy.use(range(44), keys(0, 44), 1.0)
        for number in range(1, 3):
            policy.use(range(40), keys(0, 40), 10.0 * number, ahead=4)
            slots = range(40 + 4 * number, 44 + 4 * number)
            policy.use(slots, keys(100 * number, 4), 10.0 * number + 1, after=39)
        policy.evict(100)
        history = policy._history
        watched = history.sample(map(fingerprint, keys(0, 40)))
        for _, cell, _ in watched[1:]:
            history.tags[cell] = 0
        policy.use(range(44), [*keys(0, 40), *keys(900, 4)], 60.0)
        assert min(policy._marks[:40]) > SHARED
        assert not any(policy._marks[40:44])

    def test_a_conversation_that_came_back_soon_is_told_from_one_that_came_back_late(self) -> None:
        policy = Adaptive(100)
        kinds = []
        for first, pause in ((0, 3.0), (10, 60.0)):
            policy.use(range(first, first + 4), keys(first, 4), 100.0)
            later = 100.0 + pause
            policy.use(range(first, first + 4), keys(first, 4), later, ahead=2)
            policy.use([first + 4, first + 5], keys(first + 4, 2), later, after=first + 3)
            kinds.append([policy._runs.kind[policy._runs.run_of[first + at]] for at in (0, 5)])
        assert len({kind for pair in kinds for kind in pair}) == 4

    def test_slots_have_no_marks_of_what_was_in_them_before(self) -> None:
        policy = Adaptive(20)
        policy.use(range(4), keys(0, 4), 1.0)
        policy.use([0], keys(0, 1), 10.0, ahead=4)
        policy.use(range(4, 8), keys(100, 4), 11.0, after=0)
        policy.use([0], keys(0, 1), 20.0)
        marks, rests = policy._marks, policy._rests
        assert (marks[0], rests[0]) == (SHARED + 1, 3)
        for again in (lambda: policy.use([0], keys(50, 1), 30.0), lambda: policy.load([0])):
            policy.evict(20)
            marks[0], rests[0] = SHARED + 1, 3
            again()
            assert (marks[0], rests[0]) == (0, 0)

    def test_a_part_of_a_request_that_comes_again_ends_nothing(self) -> None:
        policy = Adaptive(100)
        policy.use([20], keys(20, 1), 0.0)
        policy.use(range(10), keys(0, 10), 1.0)
        policy.use(range(5), keys(0, 5), 2.0)
        assert list(policy._rests[:10]) == [3] * 7 + [2, 1, 0]
        assert policy.evict(2) == [20, 9], "what it does not use is no older than it was"

    def test_a_clock_that_steps_back_counts_as_no_time_passed(self) -> None:
        policy = create_policy("adaptive", 10)
        policy.use([0], keys(0, 1), 1e9)
        policy.use([1], keys(1, 1), 5.0)
        policy.use([2], keys(2, 1), 1e9 + 5)
        assert policy.evict(3) == [0, 1, 2]

    def test_time_goes_on_when_the_clock_was_put_back(self) -> None:
        """Until the clock is where it was, too: else nobody would know what was used last."""
        policy = create_policy("adaptive", 64)
        for slot in range(64):
            policy.use([slot], [b"%d" % slot], 10000.0 + slot)
        order = [slot * 37 % 64 for slot in range(64)]
        for at, slot in enumerate(order):
            policy.use([slot], [b"%d" % slot], 5000.0 + at)
        assert set(policy.evict(16)) == set(order[:16])

    def test_what_is_restored_later_turns_no_clock_back(self) -> None:
        """As of a slab that is taken over from the dead: its blocks are older than what is here."""
        policy = create_policy("adaptive", 8)
        policy.use([0], [b"0"], 10000.0)
        policy.load([1, 2], [2000.0, 3000.0])
        policy.use([3], [b"3"], 10001.0)
        policy.load([4], [9000.0])
        assert policy.evict(5) == [1, 2, 4, 0, 3]

    def test_more_runs_than_are_ranked_at_once_all_get_their_turn(self) -> None:
        count = 20_000
        policy = create_policy("adaptive", count)
        for slot in range(count):
            policy.use([slot], keys(slot, 1), slot / 10)
        assert sorted(policy.evict(count)) == list(range(count))

    def test_growing_keeps_what_was_learned_and_watched(self) -> None:
        policy = Adaptive(10)
        policy.use(range(10), keys(0, 10), 1.0)
        watched = sum(tag != 0 for tag in policy._history.tags)
        policy.resize(50_000)
        assert sum(tag != 0 for tag in policy._history.tags) == watched > 0
        policy.use(range(10, 20), keys(10, 10), 2.0)
        assert policy.evict(10) == list(range(9, -1, -1))

    @pytest.mark.slow
    def test_it_does_not_look_at_all_of_very_many_to_evict_a_few(self) -> None:
        """Of ten million prompts of a block each, 64 took 8 ms of the engine's thread."""
        count = 1 << 20
        policy = create_policy("adaptive", count)
        policy.load(range(count), array("d", range(count)))
        assert len(policy.evict(1)) == 1
        tracemalloc.start()
        try:
            for _ in range(8):  # more than are queued at once
                assert len(policy.evict(100)) == 100
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < count
