"""Admission, the queue of a link, and what rests after a failure."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers.chains import SLOT, ChainRig, rule

from kvtier.chain.context import DOUBLINGS, KEYS_KEPT, Health
from kvtier.chain.plan import LinkPlan
from kvtier.chain.store import MISSED_KEPT, StoreLink, Touches
from kvtier.settings import Admission, WritePolicy
from kvtier.testing.memory import MemoryStore, MemoryTier
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Outcome, block_key

KEYS = make_keys(8)


@given(st.lists(st.lists(st.sampled_from(KEYS), max_size=5), max_size=20))
def test_touches_remember_the_most_recent_uses(batches: list[list[BlockKey]]) -> None:
    touches = Touches(kept=4)
    model: OrderedDict[BlockKey, int] = OrderedDict()
    for batch in batches:
        again = []
        for key in batch:
            count = model.pop(key, 0) + 1
            model[key] = count
            if count > 1:
                again.append(key)
        assert touches.note(batch) == again
        while len(model) > 4:
            model.popitem(last=False)
        assert len(touches) == len(model) <= 4
        assert touches.twice(KEYS) == [key for key in KEYS if model.get(key, 0) > 1]


def test_written_blocks_are_settled_a_few_at_a_time() -> None:
    """What a mover has finished meanwhile must not make one step of the engine a long one."""
    rig = ChainRig([600, 600], [rule(), rule(queue_blocks=300)])
    keys = rig.store(make_keys(300))
    for _ in range(5):
        rig.chain.poll()
    assert [len(transfer.keys) for transfer in rig.mover.queue] == [64, 64, 64, 64, 44]
    rig.mover.run_all()
    written = []
    while rig.chain.has_pending_work:
        rig.chain.poll()
        written.append(len(rig.resident(1, keys)))
    assert written == [128, 256, 300]


def test_what_was_forgotten_while_it_waited_waits_again_when_it_comes_again() -> None:
    link = StoreLink(LinkPlan(0, 1, WritePolicy.THROUGH, Admission.ALWAYS), "disk", 8, 8)
    link.committed(KEYS[:4], 0.0)
    link.forget(KEYS[1:3])
    link.committed(KEYS[1:2], 0.0)
    link.forget()
    link.committed(KEYS[:2], 0.0)
    assert link.take(8) == KEYS[:2]


def test_groups_of_one_hash_are_touched_apart() -> None:
    touches = Touches()
    one, other = block_key(b"h" * 32, 0), block_key(b"h" * 32, 1)
    assert touches.note([one]) == []
    assert touches.note([other]) == []
    assert touches.note([one]) == [one]


def open_link(
    write: WritePolicy = WritePolicy.THROUGH, queue: int = 4, window: int = 100
) -> StoreLink:
    return StoreLink(LinkPlan(0, 1, write, Admission.ALWAYS), "nvme", queue, window)


def test_a_link_queues_each_key_once_and_in_order() -> None:
    link = open_link()
    link.committed(KEYS[:3], 0.0)
    link.committed(KEYS[1:4], 0.0)
    assert link.backlog == 4
    assert link.take(2) == KEYS[:2]
    link.committed(KEYS[:1], 0.0)
    assert link.take(10) == [KEYS[2], KEYS[3], KEYS[0]]
    assert link.take(1) == []


def test_a_link_counts_what_it_has_no_room_for() -> None:
    link = open_link(queue=3)
    link.committed(KEYS[:5], 0.0)
    assert link.stats.drops == {"full": 2}
    assert (link.stats.offered, link.stats.admitted) == (5, 3)
    link.committed(KEYS[5:7], 0.0)
    assert link.stats.drops == {"full": 4}
    assert link.backlog == 3
    link.take(1)
    link.committed(KEYS[6:8], 0.0)
    assert link.stats.drops == {"full": 5}


def test_a_link_counts_what_failed() -> None:
    link = open_link()
    for _ in range(2):
        link.failed([Outcome.IO_ERROR, Outcome.GONE, Outcome.IO_ERROR])
    assert link.stats.failures == {"io_error": 4, "gone": 2}


def test_a_link_forgets() -> None:
    link = open_link()
    link.committed(KEYS[:4], 0.0)
    link.forget(KEYS[1:3])
    assert link.take(9) == [KEYS[0], KEYS[3]]
    link.committed(KEYS[:4], 0.0)
    link.forget()
    assert link.backlog == 0


def test_a_link_remembers_a_bounded_number_that_it_missed() -> None:
    link = open_link()
    assert not link.listens
    keys = make_keys(MISSED_KEPT + 2)
    link.missed(keys)
    assert link.listens
    assert link.used(keys[:4]) == keys[2:4], "the oldest are forgotten"
    assert link.used(keys[:4]) == [], "and each is offered once"
    evicting = open_link(WritePolicy.ON_EVICT)
    evicting.missed(keys[:4])
    assert evicting.used(keys[:4]) == []


def test_a_link_that_waits_for_eviction_is_offered_nothing() -> None:
    link = open_link(WritePolicy.ON_EVICT)
    link.committed(KEYS, 0.0)
    assert link.backlog == 0
    assert link.demotion_due


def test_what_was_used_twice_is_admitted_by_such_a_link_and_waits_for_eviction_too() -> None:
    link = StoreLink(LinkPlan(0, 1, WritePolicy.ON_EVICT, Admission.SECOND_TOUCH), "nvme", 4, 100)
    link.committed(KEYS, 0.0)
    link.used(KEYS[:3])
    assert link.admitted(KEYS) == KEYS[:3]
    assert (link.backlog, link.stats.offered) == (0, 0)


def test_a_window_is_at_least_one_block_and_at_most_the_queue() -> None:
    assert open_link(queue=4, window=0).room == 1
    assert open_link(queue=4, window=100).room == 4


def test_what_rests_is_bounded_and_asked_again_in_time() -> None:
    health = Health([3, 3], 10.0)
    health.rest(1, KEYS[:2], 0.0)
    health.rest(1, KEYS[1:3], 5.0)
    assert set(health.resting(1)) == set(KEYS[:3])
    assert not health.resting(0)
    health.tick(10.0)
    assert set(health.resting(1)) == set(KEYS[1:3])
    health.tick(15.0)
    assert not health.resting(1)
    health.rest(0, make_keys(KEYS_KEPT + 5), 0.0)
    assert len(health.resting(0)) == KEYS_KEPT


def test_a_tier_rests_longer_the_longer_it_fails() -> None:
    health = Health([2], 10.0)
    now, rests = 0.0, []
    health.observe(0, [Outcome.IO_ERROR], now)
    assert not health.down(0, now)
    for _ in range(DOUBLINGS + 3):
        health.observe(0, [Outcome.TIMEOUT, Outcome.CANCELLED], now)
        start = now
        while health.down(0, now):
            now += 10.0
        rests.append(now - start)
    assert rests[:3] == [10.0, 20.0, 40.0]
    assert rests[-1] == rests[-2] == 10.0 * 2**DOUBLINGS, "but not for ever longer"
    health.observe(0, [Outcome.IO_ERROR, Outcome.OK], now)
    health.observe(0, [Outcome.IO_ERROR], now)
    assert not health.down(0, now)


def test_what_ends_while_a_tier_rests_is_no_further_failure() -> None:
    """All that was under way when a disk stopped ends within one moment."""
    health = Health([2], 10.0)
    for _ in range(10):
        health.observe(0, [Outcome.TIMEOUT], 0.0)
    health.observe(0, [Outcome.TIMEOUT], 9.0)
    assert health.down(0, 9.9)
    assert not health.down(0, 10.0), "it has failed once, and not again and again"
    health.observe(0, [Outcome.TIMEOUT], 10.0)
    assert health.down(0, 29.9)
    assert not health.down(0, 30.0)


def test_what_is_not_the_tiers_fault_is_not_held_against_it() -> None:
    health = Health([1], 10.0)
    for outcome in (Outcome.GONE, Outcome.CORRUPT, Outcome.CANCELLED, Outcome.DROPPED):
        health.observe(0, [outcome], 0.0)
    health.observe(0, [], 0.0)
    assert not health.down(0, 0.0)


def test_a_block_that_arrives_while_a_tier_rests_ends_its_rest() -> None:
    health = Health([1], 30.0)
    health.observe(0, [Outcome.IO_ERROR], 0.0)
    assert health.down(0, 1.0)
    health.observe(0, [Outcome.IO_ERROR, Outcome.OK], 1.0)
    assert not health.down(0, 1.0)


def test_a_tier_that_is_well_again_is_tried_once_at_once() -> None:
    tier = MemoryTier(MemoryStore(NAMESPACE, SLOT))
    tier.unwell = True
    health = Health([3], 30.0)
    for now in (0.0, 0.0, 0.0, 30.0, 90.0):
        health.observe(0, [Outcome.TIMEOUT], now)
    health.rest(0, KEYS, 90.0)
    health.tick(91.0, [tier])
    assert health.down(0, 209.9)
    assert health.resting(0)
    tier.unwell = False
    health.tick(92.0, [tier])
    assert not health.down(0, 92.0)
    assert not health.resting(0), "they have failed with it"
    health.observe(0, [Outcome.TIMEOUT], 92.0)
    health.tick(93.0, [tier])
    assert health.down(0, 121.9)
    assert not health.down(0, 122.0), "as at first"


@pytest.mark.parametrize("strikes", [1, 2])
@pytest.mark.parametrize("by", ["a block", "an answer"])
def test_keys_that_failed_with_a_tier_rest_no_longer_than_it(strikes: int, by: str) -> None:
    health = Health([strikes], 30.0)
    health.observe(0, [Outcome.IO_ERROR], 0.0)
    health.rest(0, KEYS, 0.0)
    if by == "a block":
        health.observe(0, [Outcome.OK], 1.0)
    else:
        health.answers(0)
    assert bool(health.resting(0)) is (strikes > 1), "without it they are left alone"


def test_a_key_that_fails_again_rests_anew_and_holds_up_no_other() -> None:
    health = Health([3], 30.0)
    health.rest(0, KEYS[:2], 0.0)
    health.rest(0, KEYS[:1], 10.0)
    health.tick(30.0)
    assert list(health.resting(0)) == KEYS[:1]
    health.tick(40.0)
    assert not health.resting(0)
