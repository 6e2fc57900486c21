"""What runs behind an engine: write policies, admission, demotion, pressure and failure."""

from __future__ import annotations

import pytest
from support.tiers.chains import KEYS, REST, STORE_DEADLINE, ChainRig, rule

from kvtier.chain.store import STEP_BLOCKS
from kvtier.interfaces.mover import TransferKind
from kvtier.settings import Admission, WritePolicy
from kvtier.testing.subject import make_keys
from kvtier.types import Outcome, Presence

THROUGH, ON_EVICT, NEVER = WritePolicy.THROUGH, WritePolicy.ON_EVICT, WritePolicy.NEVER
SECOND = Admission.SECOND_TOUCH
FAR = 1e9


def test_a_stored_block_goes_down_behind_the_engine() -> None:
    rig = ChainRig([8, 16, 32])
    keys = rig.store(KEYS[:4])
    assert rig.mover.queue == [], "the engine waits for nothing"
    assert rig.chain.has_pending_work
    rig.chain.poll()
    (transfer,) = rig.mover.queue
    assert (transfer.kind, transfer.source, transfer.target) == (TransferKind.STORE, 0, 1)
    assert transfer.deadline == rig.now + STORE_DEADLINE
    rig.settle()
    assert rig.resident(1, keys) == rig.resident(2, keys) == keys
    assert not rig.chain.has_pending_work
    rig.assert_quiet()


def test_each_tier_is_offered_what_the_one_above_has_committed() -> None:
    rig = ChainRig([16, 16, 32])
    keys = rig.store(KEYS[:3])
    rig.chain.poll()
    rig.mover.run_all({keys[1]: Outcome.CORRUPT})
    rig.chain.poll()
    rig.chain.poll()
    (transfer,) = rig.mover.queue
    assert (transfer.source, transfer.target) == (0, 2), "from host memory while it is there"
    assert transfer.keys == [keys[0], keys[2]]
    rig.settle()
    assert rig.resident(0, keys) == rig.resident(1, keys) == [keys[0], keys[2]]
    assert rig.chain.lookup(keys) == [Presence.HIT, Presence.MISS, Presence.HIT]
    assert sum(tier.stats().corrupt for tier in rig.tiers) == 1, (
        "it is bad at its source, and offered no more"
    )
    near, _ = rig.chain.chain_stats().links
    assert near.failures == {"corrupt": 1}
    rig.assert_quiet()


@pytest.mark.parametrize(
    "outcome", [Outcome.IO_ERROR, Outcome.NO_SPACE, Outcome.TIMEOUT, Outcome.DROPPED]
)
def test_what_a_tier_cannot_write_goes_to_the_one_below(outcome: Outcome) -> None:
    rig = ChainRig([16, 16, 32])
    keys = rig.store(KEYS[:3])
    rig.chain.poll()
    rig.mover.run_all({keys[1]: outcome})
    rig.settle()
    assert rig.resident(1, keys) == [keys[0], keys[2]]
    assert rig.resident(0, keys) == rig.resident(2, keys) == keys
    rig.assert_quiet()


def test_a_tier_that_is_down_does_not_cut_off_the_one_below() -> None:
    rig = ChainRig([8, 16, 32])
    for key in KEYS[:3]:
        rig.store([key])
        rig.chain.poll()
        rig.mover.fail_all(Outcome.IO_ERROR)
        rig.settle()
    assert rig.chain.chain_stats().down == [False, True, False]
    rig.store(KEYS[3:5])
    rig.settle()
    assert rig.resident(1, KEYS[:5]) == []
    assert rig.resident(2, KEYS[:5]) == KEYS[:5]
    rig.assert_quiet()


def test_a_tier_without_room_does_not_cut_off_the_one_below() -> None:
    rig = ChainRig([8, 4, 32])
    rig.put(1, KEYS[20:23])
    held = rig.tiers[1].prepare_load(KEYS[20:23])
    keys = rig.store(KEYS[:4])
    rig.settle()
    assert len(rig.resident(1, keys)) == 1
    assert rig.resident(2, keys) == keys
    assert not rig.chain.has_pending_work
    rig.tiers[1].complete_load(KEYS[20:23])
    del held


def test_what_host_memory_no_longer_has_comes_from_the_tier_between() -> None:
    rig = ChainRig([8, 16, 32])
    keys = rig.store(KEYS[:2])
    rig.chain.poll()
    rig.mover.run_all()
    rig.tiers[0].forget(keys)
    rig.chain.poll()
    (transfer,) = rig.mover.queue
    assert (transfer.source, transfer.target) == (1, 2)
    rig.settle()
    assert rig.resident(2, keys) == keys


def test_what_nobody_has_any_more_is_dropped_and_counted() -> None:
    rig = ChainRig([8, 16])
    keys = rig.store(KEYS[:3])
    rig.tiers[0].forget(keys[:2])
    rig.settle()
    (link,) = rig.chain.chain_stats().links
    assert link.drops == {"gone": 2}
    assert rig.resident(1, keys) == keys[2:]


def test_a_promoted_block_fills_the_tiers_that_it_passed() -> None:
    rig = ChainRig([8, 16, 32])
    keys = rig.put(2, KEYS[:3])
    rig.load_once(keys)
    rig.settle()
    assert rig.resident(0, keys) == rig.resident(1, keys) == keys
    assert [link.offered for link in rig.chain.chain_stats().links] == [3, 0]
    rig.put(1, KEYS[5:7])
    rig.load_once(KEYS[5:7])
    assert rig.chain.chain_stats().links[0].offered == 3, "it came from there"


def test_what_is_stored_again_when_its_last_reader_has_ended_is_on_its_way() -> None:
    rig = ChainRig([8, 16])
    keys = rig.store(KEYS[:2])
    ticket = rig.chain.begin_load(keys, "reader", FAR)
    rig.chain.forget(keys)
    rig.chain.end_load(ticket)
    taken = rig.chain.prepare_store(keys)
    assert taken.keys == keys
    assert rig.chain.lookup(keys) == [Presence.PENDING] * 2
    rig.write(0, taken.keys, taken.spec)
    rig.chain.complete_store(keys)
    assert rig.chain.lookup(keys) == [Presence.HIT] * 2


def test_what_came_from_the_lowest_tier_takes_no_places_on_the_way_back_to_it() -> None:
    """The tier between has it from there, and offers it as all that it takes."""
    rig = ChainRig([16, 16, 32], [rule(), rule(), rule(queue_blocks=4)])
    popular, slow = rig.put(2, KEYS[:4]), rig.store(KEYS[4:8])
    rig.chain.poll()
    rig.mover.run_all()
    rig.chain.poll()
    (uploading,) = rig.mover.queue
    assert (uploading.target, uploading.keys) == (2, slow), "as much as may be under way"
    ticket = rig.chain.begin_load(popular, "reader", FAR)
    new = KEYS[8:12]
    for work in (lambda: None, lambda: rig.store(new)):
        work()
        for _ in range(3):
            for transfer in [each for each in rig.mover.queue if each is not uploading]:
                rig.mover.run(transfer)
            rig.chain.poll()
    rig.chain.end_load(ticket)
    rig.settle()
    assert rig.resident(1, KEYS[:12]) == KEYS[:12]
    assert rig.resident(2, new) == new
    _, far = rig.chain.chain_stats().links
    assert (far.written, far.drops) == (8, {})


def test_a_queue_that_is_full_drops_and_counts() -> None:
    rig = ChainRig([32, 64], [rule(), rule(queue_blocks=4)])
    rig.store(KEYS[:10])
    (link,) = rig.chain.chain_stats().links
    assert (link.waiting, link.drops) == (4, {"full": 6})
    rig.settle()
    assert rig.resident(1, KEYS[:10]) == KEYS[:4]


def test_nothing_below_makes_room_for_a_mover_that_is_down() -> None:
    rig = ChainRig([8, 4])
    rig.put(1, KEYS[4:8])
    rig.store(KEYS[:3])
    rig.mover.down = True
    rig.chain.poll()
    (link,) = rig.chain.chain_stats().links
    assert (link.waiting, link.drops) == (3, {})
    assert rig.resident(1, KEYS[4:8]) == KEYS[4:8]
    assert rig.chain.has_pending_work, "it may be back at the next step"
    rig.mover.lost = True
    assert not rig.chain.has_pending_work, "no step would start anything"
    rig.mover.down = rig.mover.lost = False
    rig.settle()
    assert rig.resident(1, KEYS[:3]) == KEYS[:3]


def under_way(rig: ChainRig) -> int:
    return sum(len(transfer.keys) for transfer in rig.mover.queue)


def test_one_step_starts_a_bounded_number_of_blocks() -> None:
    """Beside as many as have come since the last one."""
    count = 8 * STEP_BLOCKS
    rig = ChainRig([count, count], [rule(), rule(queue_blocks=count)])
    rig.mover.down = True
    keys = rig.store(make_keys(count))
    rig.chain.poll()
    rig.mover.down = False
    for started in (1, 2, 3, 4, 4):
        rig.chain.poll()
        assert under_way(rig) == started * STEP_BLOCKS, "half of host memory stays without pins"
    assert all(len(each.keys) == STEP_BLOCKS for each in rig.mover.queue), "they end one by one"
    for _ in range(2):
        rig.mover.run(rig.mover.queue[0])
    rig.chain.poll()
    assert under_way(rig) == 4 * STEP_BLOCKS, "as much room as became free is filled again"
    rig.settle(20)
    assert rig.resident(1, keys) == keys


@pytest.mark.slow
@pytest.mark.parametrize(("write", "lower"), [(THROUGH, 1), (THROUGH, 2), (ON_EVICT, 1)])
def test_no_store_is_dropped_beside_an_idle_disk(write: WritePolicy, lower: int) -> None:
    """A step that computes 16k tokens in blocks of 128 brings 128 at once, and long before the next
    one the disk has written them. At a fixed 64 a step 1600 of these 4096 are dropped as "full", or
    1024 as "gone" before they are written ahead of eviction."""
    steps, blocks, host = 32, 128, 2048
    disks = [rule(write, queue_blocks=512), rule(queue_blocks=512)][:lower]
    rig = ChainRig([host, *[4096] * lower], [rule(), *disks])
    for step in range(steps):
        rig.store(make_keys(blocks, start=step * blocks))
        rig.chain.poll()
        rig.mover.run_all()
    rig.settle()
    links = rig.chain.chain_stats().links
    assert [link.drops for link in links] == [{}] * lower
    evicted = steps * blocks - host
    assert all(link.written >= (steps * blocks if write is THROUGH else evicted) for link in links)


def test_a_disk_that_is_slower_than_the_engine_is_never_idle() -> None:
    rig = ChainRig([1024, 4096], [rule(), rule(queue_blocks=512)])
    for step in range(24):
        rig.store(make_keys(128, start=step * 128))
        rig.chain.poll()
        assert 64 <= under_way(rig) <= 512
        rig.mover.run(rig.mover.queue[0])
    (link,) = rig.chain.chain_stats().links
    assert link.written == 23 * 64


def test_a_tier_that_fails_is_not_written_to_but_read() -> None:
    rig = ChainRig([8, 16])
    rig.put(1, KEYS[20:22])
    for key in KEYS[:3]:
        rig.store([key])
        rig.chain.poll()
        rig.mover.fail_all(Outcome.IO_ERROR)
        rig.chain.poll()
    rig.store(KEYS[3:5])
    rig.chain.poll()
    (link,) = rig.chain.chain_stats().links
    assert rig.mover.queue == []
    assert link.drops == {"down": 2}
    assert rig.chain.chain_stats().down == [False, True]
    assert rig.chain.lookup(KEYS[20:22]) == [Presence.HIT] * 2
    rig.now += REST
    rig.store(KEYS[5:6])
    rig.settle()
    assert rig.resident(1, KEYS[5:6]) == KEYS[5:6]


def test_a_tier_that_is_left_alone_leaves_the_engine_alone() -> None:
    rig = ChainRig([8, 16], [rule(), rule(ON_EVICT)])
    for number in range(3):
        rig.store(make_keys(8, start=100 * number))
        rig.chain.poll()
        rig.mover.fail_all(Outcome.IO_ERROR)
        rig.chain.poll()
    rig.settle()
    rig.store(KEYS[:8])
    assert rig.chain.has_pending_work
    rig.chain.poll()
    assert rig.mover.queue == []
    assert not rig.chain.has_pending_work, "no steps for what cannot be done"


MANY = 16 * STEP_BLOCKS
"""So many slots that more of them are written down ahead of need than one step begins."""


def test_a_tier_without_room_leaves_an_idle_engine_alone() -> None:
    """Of what eviction takes next more is to be written down than a step begins."""
    rig = ChainRig([MANY, 4], [rule(), rule(ON_EVICT, queue_blocks=MANY)])
    rig.tiers[1].prepare_load(rig.put(1, KEYS[:4]))
    keys = rig.store(make_keys(MANY, start=2 * MANY))
    assert rig.chain.has_pending_work
    rig.settle(4)
    assert rig.resident(1, keys) == []
    assert not rig.chain.has_pending_work, "no steps for what cannot be done"


@pytest.mark.parametrize("outcome", [Outcome.NO_SPACE, Outcome.DROPPED])
def test_a_tier_that_takes_nothing_is_not_tried_again_and_again(outcome: Outcome) -> None:
    """A full disk is no failure of the tier's, and it is not left alone for a while."""
    rig = ChainRig([MANY, MANY], [rule(), rule(ON_EVICT, queue_blocks=MANY)])
    rig.store(make_keys(MANY))
    tries = 0
    while rig.chain.has_pending_work and tries < 2 * MANY // STEP_BLOCKS:
        rig.chain.poll()
        tries += len(rig.mover.queue)
        rig.mover.fail_all(outcome)
    assert not rig.chain.has_pending_work
    assert tries <= 2
    rig.store(make_keys(1, start=2 * MANY))
    assert rig.chain.has_pending_work, "once more, when there is something new"


def test_a_mover_that_is_not_there_leaves_an_idle_engine_alone() -> None:
    rig = ChainRig([MANY, MANY], [rule(), rule(ON_EVICT, queue_blocks=MANY)])
    rig.mover.accepting = False
    rig.store(make_keys(MANY))
    rig.settle(4)
    assert not rig.chain.has_pending_work
    (link,) = rig.chain.chain_stats().links
    assert link.drops == {"refused": MANY // 8}, "once, what eviction takes next"
    assert link.in_flight == 0
    rig.assert_quiet()


def test_what_was_cleared_does_not_come_back() -> None:
    rig = ChainRig([8, 16, 32])
    rig.store(KEYS[:2])
    rig.chain.poll()
    held = rig.chain.prepare_store(KEYS[2:4])
    rig.put(1, KEYS[4:6])
    ticket = rig.chain.begin_load(KEYS[4:6], "a", FAR)
    rig.chain.clear()
    rig.write(0, held.keys, held.spec)
    rig.chain.complete_store(held.keys)
    rig.settle()
    assert ticket.failed == dict.fromkeys(KEYS[4:6], Outcome.CANCELLED)
    rig.chain.end_load(ticket)
    assert rig.chain.lookup(KEYS[:6]) == [Presence.MISS] * 6
    assert all(rig.resident(tier, KEYS[:6]) == [] for tier in range(3))
    rig.assert_quiet()


def test_what_was_forgotten_is_not_written_down() -> None:
    rig = ChainRig([8, 16])
    keys = rig.store(KEYS[:4])
    rig.chain.poll()
    more = rig.store(KEYS[4:6])
    rig.chain.forget([keys[0], more[0]])
    rig.settle()
    assert rig.resident(1, KEYS[:6]) == [*keys[1:], more[1]]
    assert rig.chain.lookup([keys[0], more[0]]) == [Presence.MISS] * 2


def test_use_is_passed_on_to_lower_tiers_a_step_later() -> None:
    rig = ChainRig([8, 16])
    rig.store(KEYS[:2])
    rig.settle()
    rig.chain.touch(KEYS[:1])
    rig.chain.poll()
    assert rig.tiers[1].victims(1) == [KEYS[1]]


def test_closing_commits_what_was_finished() -> None:
    rig = ChainRig([8, 16])
    keys = rig.store(KEYS[:3])
    rig.chain.poll()
    rig.mover.run_all()
    rig.mover.close()
    rig.chain.close()
    assert rig.resident(1, keys) == keys
