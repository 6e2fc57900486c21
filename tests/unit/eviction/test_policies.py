"""What defines each eviction policy."""

from __future__ import annotations

import random

import pytest
from support.scheduler.eviction_requests import chats, keys

from benchmarks.eviction.reference_policies import EVERY_POLICY, new_policy
from benchmarks.eviction.replay import replay


@pytest.mark.parametrize("name", EVERY_POLICY)
class TestEveryPolicy:
    def test_a_prefix_outlives_its_tail(self, name: str) -> None:
        policy = new_policy(name, 8)
        policy.use([3, 1, 4], keys(0, 3), 1.0)
        assert policy.evict(3) == [4, 1, 3]

    def test_blocks_stored_after_a_hit_leave_before_it(self, name: str) -> None:
        policy = new_policy(name, 8)
        policy.use([0, 1], keys(0, 2), 1.0)
        policy.use([0, 1], keys(0, 2), 2.0, ahead=2)
        policy.use([2, 3], keys(2, 2), 2.5, after=1)
        assert policy.evict(4) == [3, 2, 1, 0]

    def test_a_restored_prefix_outlives_its_tail_however_long_it_is(self, name: str) -> None:
        count = 100
        policy = new_policy(name, 3 * count)
        slots = list(range(3 * count))
        policy.load(slots, [float(slot // count) for slot in slots])
        assert policy.evict(3 * count) == slots

    def test_chances_are_told_and_change_nothing(self, name: str) -> None:
        policy = new_policy(name, 8)
        policy.load([5, 2, 7], [10.0, 11.0, 12.0])
        policy.use([0, 1], keys(0, 2), 20.0)
        before = policy.victims(5)
        chances = policy.chances(before, 10.0, 30.0)
        assert len(chances) == 5
        assert all(0.0 <= chance <= 1.0 for chance in chances)
        assert policy.victims(5) == before
        assert list(policy.chances([], 10.0, 30.0)) == []

    def test_restored_blocks_leave_before_what_is_used_later(self, name: str) -> None:
        policy = new_policy(name, 8)
        policy.load([5, 2, 7])
        policy.use([2], keys(0, 1), 1000.0)
        assert policy.evict(3) == [5, 7, 2]

    def test_a_hundred_thousand_blocks_are_restored_at_once(self, name: str) -> None:
        count = 100_000
        policy = new_policy(name, count)
        policy.load(range(count), [float(index // 50) for index in range(count)])
        assert len(policy) == count
        assert len(set(policy.evict(count))) == count

    @pytest.mark.slow
    def test_its_state_is_small(self, name: str) -> None:
        count = 50_000
        policy = new_policy(name, count)
        for first in range(0, 4 * count, 25):
            missing = 25 - (count - len(policy))
            slots = policy.evict(missing) if missing > 0 else list(range(first, first + 25))
            policy.use(slots, keys(first, 25), first / 1000)
        assert len(policy) == count
        assert policy.nbytes <= 45 * count

    @pytest.mark.slow
    def test_its_state_is_bounded_where_each_block_is_a_prompt_of_its_own(self, name: str) -> None:
        count = 20_000
        policy = new_policy(name, count)
        for number in range(3 * count):
            slots = policy.evict(1) if len(policy) == count else [number]
            policy.use(slots, keys(number, 1), number / 1000)
        assert len(policy) == count
        assert policy.nbytes <= 75 * count

    def test_the_same_calls_give_the_same_answers(self, name: str) -> None:
        trace = chats(random.Random(7), 400)
        assert replay(trace, new_policy(name), 300) == replay(trace, new_policy(name), 300)

    def test_what_is_foretold_again_is_the_same(self, name: str) -> None:
        policy = new_policy(name, 8)
        policy.load(range(8))
        first = policy.victims(4)
        for count in (2, 3, 1):
            assert policy.victims(count) == first[:count]
        assert policy.victims(2, {first[0]}) == first[1:3]
        assert policy.evict(3) + policy.evict(1) == first


class TestS3FIFO:
    def test_what_was_used_once_leaves_before_what_was_used_again(self) -> None:
        policy = new_policy("s3fifo", 10)
        policy.use([0, 1], keys(0, 2), 1.0)
        policy.use([0], keys(0, 1), 2.0)
        policy.use([2, 3], keys(2, 2), 3.0)
        assert policy.evict(3) == [1, 3, 2]

    def test_what_comes_back_soon_after_eviction_goes_to_the_main_queue(self) -> None:
        policy = new_policy("s3fifo", 10)
        policy.use([0], keys(0, 1), 1.0)
        policy.evict(1)
        policy.use([0], keys(0, 1), 2.0)
        for slot in range(1, 9):
            policy.use([slot], keys(slot, 1), 3.0)
        assert policy.evict(8) == list(range(1, 9))

    def test_what_was_used_more_often_has_more_turns(self) -> None:
        policy = new_policy("s3fifo", 10)
        policy.load([0, 1])
        for slot in (0, 0, 0, 1):
            policy.use([slot], keys(slot, 1), 1.0)
        assert policy.evict(2) == [1, 0]


class TestARC:
    def test_a_scan_does_not_wash_out_what_was_used_twice(self) -> None:
        policy = new_policy("arc", 8)
        policy.use([0, 1], keys(0, 2), 1.0)
        policy.use([0, 1], keys(0, 2), 2.0)
        for number in range(100, 140):
            slot = policy.evict(1)[0] if len(policy) == 8 else len(policy)
            policy.use([slot], keys(number, 1), float(number))
        assert 0 in policy
        assert 1 in policy

    def test_ghosts_of_new_blocks_give_new_blocks_more_room(self) -> None:
        policy = new_policy("arc", 4)
        policy.use([0, 1], keys(0, 2), 1.0)
        policy.use([0, 1], keys(0, 2), 2.0)
        policy.use([2, 3], keys(2, 2), 3.0)
        assert policy.evict(1) == [3]
        policy.use([3], keys(3, 1), 4.0)
        assert policy.evict(1) == [1], "the block used once is within its larger share"
