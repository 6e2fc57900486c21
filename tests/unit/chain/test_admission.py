"""What goes down when: demotion before eviction, and admission at the second touch."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.tiers.chains import KEYS, REST, SLOT, ChainRig, rule

from kvtier.chain import store as write_links
from kvtier.chain.context import DOUBLINGS, KEYS_KEPT, Health
from kvtier.chain.plan import LinkPlan
from kvtier.chain.store import MISSED_KEPT, StoreLink, Touches
from kvtier.settings import Admission, WritePolicy
from kvtier.testing.memory import MemoryStore, MemoryTier
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Outcome, TierStats

THROUGH, ON_EVICT, NEVER = WritePolicy.THROUGH, WritePolicy.ON_EVICT, WritePolicy.NEVER
SECOND = Admission.SECOND_TOUCH
FAR = 1e9


def test_demotion_comes_before_eviction() -> None:
    rig = ChainRig([16, 32], [rule(), rule(ON_EVICT)])
    keys = rig.store(KEYS[:10])
    rig.settle()
    assert rig.resident(1, keys) == [], "there is room"
    assert not rig.chain.has_pending_work
    rig.store(KEYS[10:15])
    rig.settle()
    first = rig.resident(1, KEYS[:16])
    assert len(first) == 1, "two slots shall be free or written down: one is free"
    rig.store(KEYS[15:16])
    rig.settle()
    assert len(rig.resident(1, KEYS[:16])) == 2
    assert rig.chain.prepare_store(KEYS[20:22]).evicted == rig.tiers[1].victims(2)
    rig.chain.poll()
    (link,) = rig.chain.chain_stats().links
    assert (link.written, link.drops) == (2, {})


def test_what_was_demoted_leaves_from_its_end_as_it_came() -> None:
    """Without its first blocks a prompt is of no use: they go last from every tier."""
    rig = ChainRig([64, 64], [rule(), rule(ON_EVICT)])
    rig.store(KEYS)
    rig.settle()
    assert rig.resident(1, KEYS) == KEYS[56:]
    assert rig.tiers[1].victims(8) == KEYS[:55:-1]


def test_a_tier_that_cannot_fill_its_capacity_demotes_before_eviction_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder has tables, too, and other models' blocks."""
    stats = MemoryTier.stats

    def of_twice_the_size(tier: MemoryTier) -> TierStats:
        return replace(stats(tier), bytes_capacity=2 * stats(tier).bytes_capacity)

    monkeypatch.setattr(MemoryTier, "stats", of_twice_the_size)
    rig = ChainRig([16, 32], [rule(), rule(ON_EVICT)])
    rig.store(KEYS[:16])
    rig.settle()
    assert len(rig.resident(1, KEYS[:16])) == 4


def test_a_block_that_is_being_demoted_is_not_evicted() -> None:
    rig = ChainRig([8, 32], [rule(), rule(ON_EVICT)])
    rig.store(KEYS[:8])
    rig.chain.poll()
    (transfer,) = rig.mover.queue
    taken = rig.chain.prepare_store(KEYS[10:18])
    assert len(taken.keys) == 7
    assert not set(taken.evicted) & set(transfer.keys)
    rig.mover.run_all()
    rig.chain.poll()
    assert rig.resident(1, transfer.keys) == list(transfer.keys)


def test_what_eviction_takes_before_it_was_demoted_is_counted() -> None:
    rig = ChainRig([8, 32], [rule(), rule(ON_EVICT)])
    rig.store(KEYS[:8])
    taken = rig.chain.prepare_store(KEYS[10:14])
    assert len(taken.evicted) == 4
    rig.chain.poll()
    (link,) = rig.chain.chain_stats().links
    assert link.drops == {"gone": 4}


def test_second_touch_admits_what_was_loaded_after_it_was_stored() -> None:
    rig = ChainRig([8, 16], [rule(), rule(THROUGH, SECOND)])
    keys = rig.store(KEYS[:4])
    rig.settle()
    assert rig.resident(1, keys) == []
    rig.load_once(keys[1:3])
    rig.settle()
    assert rig.resident(1, keys) == keys[1:3]
    (link,) = rig.chain.chain_stats().links
    assert (link.offered, link.admitted) == (6, 2)


def test_what_is_loaded_from_a_tier_is_not_dropped_on_the_way_to_it() -> None:
    rig = ChainRig([8, 16], [rule(), rule(THROUGH, SECOND)])
    keys = rig.store(KEYS[:4])
    rig.load_once(keys)
    rig.settle()
    rig.tiers[0].forget(keys)
    ticket = rig.chain.begin_load(keys, "reader", FAR)
    rig.chain.poll()
    rig.settle()
    rig.chain.end_load(ticket)
    (link,) = rig.chain.chain_stats().links
    assert (link.written, link.drops) == (4, {})


def test_what_is_still_on_its_way_up_past_a_tier_is_not_gone() -> None:
    rig = ChainRig([8, 16, 32], [rule(), rule(THROUGH, SECOND), rule(NEVER)])
    keys = rig.put(2, KEYS[:4])
    rig.load_once(keys)
    rig.settle()
    for tier in rig.tiers[:2]:
        tier.forget(keys)
    rig.chain.begin_load(keys, "reader", FAR)
    rig.chain.poll()
    rig.settle()
    assert rig.resident(1, keys) == keys
    (link,) = rig.chain.chain_stats().links
    assert (link.written, link.drops) == (8, {})


def test_what_a_tier_has_keeps_nothing_from_it_though_it_is_used_again_and_again() -> None:
    rig = ChainRig([16, 16], [rule(), rule(THROUGH, SECOND, queue_blocks=4)])
    popular, new = rig.store(KEYS[:4]), KEYS[4:8]
    rig.load_once(popular)
    rig.store(new)
    for keys in (popular, new):
        rig.chain.begin_load(keys, "reader", FAR)
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]
    (link,) = rig.chain.chain_stats().links
    assert (link.offered, link.written, link.drops) == (16, 8, {})


def test_second_touch_admits_what_is_used_again_though_the_engine_has_it_itself() -> None:
    """What is asked for most is never loaded, because an engine's own memory does not let it go."""
    rig = ChainRig([8, 16], [rule(), rule(THROUGH, SECOND)])
    rig.chain.touch(KEYS[:4])
    rig.store(KEYS[:4])
    rig.settle()
    assert rig.resident(1, KEYS[:4]) == [], "one request has used it"
    rig.chain.touch(KEYS[:3])
    rig.settle()
    assert rig.resident(1, KEYS[:4]) == KEYS[:3]


def test_second_touch_admits_what_is_stored_again() -> None:
    rig = ChainRig([8, 16], [rule(), rule(THROUGH, SECOND)])
    rig.store(KEYS[:2])
    rig.tiers[0].forget(KEYS[:2])
    rig.store(KEYS[:2])
    rig.settle()
    assert rig.resident(1, KEYS[:2]) == KEYS[:2]


def test_second_touch_demotes_only_what_was_used_twice() -> None:
    rig = ChainRig([8, 16], [rule(), rule(ON_EVICT, SECOND)])
    keys = rig.store(KEYS[:7])
    rig.load_once(keys[:3])
    rig.store(KEYS[7:8])
    for _ in range(12):
        rig.settle(2)
        rig.store(make_keys(1, start=1000 + sum(tier.stats().stored for tier in rig.tiers)))
    assert set(rig.resident(1, KEYS[:8])) <= set(keys[:3])
    assert rig.resident(1, keys[:3])
    (link,) = rig.chain.chain_stats().links
    assert link.drops == {}, "what is not admitted is not lost"


@pytest.mark.slow
def test_what_leaves_a_tier_of_many_blocks_is_known_to_have_been_used_twice() -> None:
    """Before it goes, more are used than a link remembers otherwise: nothing came down."""
    count = write_links.TOUCHES_KEPT + 512
    rig = ChainRig([count, 512], [rule(), rule(ON_EVICT, SECOND)])
    keys = make_keys(count)
    for start in range(0, count, 512):
        rig.load_once(rig.store(keys[start : start + 512]))
    rig.settle()
    assert rig.resident(1, keys) == keys[256:512], "the end of what was used first"


@pytest.mark.slow
def test_what_stays_in_a_tier_of_many_blocks_comes_down_when_it_is_used_again() -> None:
    """After more others than a link remembers otherwise."""
    count = write_links.TOUCHES_KEPT + 512
    rig = ChainRig([count, 512], [rule(), rule(admission=SECOND)])
    keys = make_keys(count)
    for start in range(0, count, 512):
        rig.store(keys[start : start + 512])
    assert rig.resident(1, keys) == []
    rig.load_once(keys[:64])
    rig.settle()
    assert rig.resident(1, keys) == keys[:64]


def test_what_came_while_a_tier_was_down_comes_there_when_it_is_used() -> None:
    rig = ChainRig([16, 16])
    for key in KEYS[:3]:
        rig.store([key])
        rig.chain.poll()
        rig.mover.fail_all(Outcome.IO_ERROR)
        rig.chain.poll()
    rig.store(KEYS[3:6])
    rig.chain.poll()
    rig.load_once(KEYS[:6])
    rig.chain.poll()
    (link,) = rig.chain.chain_stats().links
    assert (link.drops, rig.mover.queue) == ({"down": 3}, []), "nothing is offered to who is down"
    rig.now += REST
    rig.load_once(KEYS[:2])
    rig.chain.touch(KEYS[3:5])  # the engine has these itself, and loads them from nobody
    rig.settle()
    assert rig.resident(1, KEYS[:6]) == [*KEYS[:2], *KEYS[3:5]]
    rig.load_once(KEYS[:6])
    rig.settle()
    assert rig.resident(1, KEYS[:6]) == KEYS[:6]
    rig.assert_quiet()


def test_what_found_no_room_in_a_queue_or_a_tier_comes_there_when_it_is_used() -> None:
    rig = ChainRig([32, 8], [rule(), rule(queue_blocks=4)])
    rig.put(1, KEYS[20:26])
    rig.tiers[1].prepare_load(KEYS[20:26])
    rig.store(KEYS[:6])
    rig.settle()
    assert rig.resident(1, KEYS[:6]) == KEYS[:2]
    rig.tiers[1].complete_load(KEYS[20:26])
    rig.load_once(KEYS[:6])
    rig.settle()
    assert rig.resident(1, KEYS[:6]) == KEYS[:6]
    rig.assert_quiet()


@pytest.mark.parametrize("how", ["full", "forgotten", "cleared", "evicted"])
def test_what_is_not_offered_again(how: str) -> None:
    """What is full says so after it has taken the bytes; and what went on purpose stays gone."""
    rig = ChainRig([8, 16])
    keys = rig.store(KEYS[:2])
    rig.chain.poll()
    rig.mover.fail_all(Outcome.NO_SPACE if how == "full" else Outcome.DROPPED)
    rig.settle()
    if how == "forgotten":
        rig.chain.forget(keys)
    elif how == "cleared":
        rig.chain.clear()
    elif how == "evicted":
        rig.put(1, keys)
        rig.load_once(keys)
        rig.settle()
        rig.tiers[1].forget(keys)
    rig.put(0, keys)
    rig.load_once(keys)
    rig.settle()
    assert rig.resident(1, keys) == []


# -- admission, the queue of a link, and what rests after a failure


FEW = make_keys(8)


@given(st.lists(st.lists(st.sampled_from(FEW), max_size=5), max_size=20))
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
        assert touches.twice(FEW) == [key for key in FEW if model.get(key, 0) > 1]


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
    link.committed(FEW[:4], 0.0)
    link.forget(FEW[1:3])
    link.committed(FEW[1:2], 0.0)
    link.forget()
    link.committed(FEW[:2], 0.0)
    assert link.take(8) == FEW[:2]


def open_link(
    write: WritePolicy = WritePolicy.THROUGH, queue: int = 4, window: int = 100
) -> StoreLink:
    return StoreLink(LinkPlan(0, 1, write, Admission.ALWAYS), "nvme", queue, window)


def test_a_link_queues_each_key_once_and_in_order() -> None:
    link = open_link()
    link.committed(FEW[:3], 0.0)
    link.committed(FEW[1:4], 0.0)
    assert link.backlog == 4
    assert link.take(2) == FEW[:2]
    link.committed(FEW[:1], 0.0)
    assert link.take(10) == [FEW[2], FEW[3], FEW[0]]
    assert link.take(1) == []


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


def test_a_window_is_at_least_one_block_and_at_most_the_queue() -> None:
    assert open_link(queue=4, window=0).room == 1
    assert open_link(queue=4, window=100).room == 4


def test_what_rests_is_bounded_and_asked_again_in_time() -> None:
    health = Health([3, 3], 10.0)
    health.rest(1, FEW[:2], 0.0)
    health.rest(1, FEW[1:3], 5.0)
    assert set(health.resting(1)) == set(FEW[:3])
    assert not health.resting(0)
    health.tick(10.0)
    assert set(health.resting(1)) == set(FEW[1:3])
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
