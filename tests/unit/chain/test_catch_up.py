"""What outlived a restart above, and comes down behind everything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers.chains import KEYS, REST, SLOT, ChainRig, Outliving, rule

from kvtier.chain.plan import LinkPlan
from kvtier.chain.store import LOOKED_AT, PAUSE_S, STEP_BLOCKS, WAIT_LIMIT_S, CatchUp, StoreLink
from kvtier.settings import Admission, WritePolicy
from kvtier.slab.recovery import Survivors
from kvtier.testing.memory import MemoryStore
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Outcome

LATER = WAIT_LIMIT_S + 1


def restarted(slots: Sequence[int], count: int, **rules: object) -> ChainRig:
    """A chain whose first tier, alone, holds blocks that outlived another process."""
    rig = ChainRig(slots, [rule(), *[rule(**rules) for _ in slots[1:]]])  # type: ignore[arg-type]
    rig.put(0, make_keys(count))
    rig.restart()
    return rig


def under_way(rig: ChainRig) -> list[BlockKey]:
    return [key for transfer in rig.mover.queue for key in transfer.keys]


def behind(rig: ChainRig) -> list[int]:
    return [link.behind for link in rig.chain.chain_stats().links]


def test_the_hottest_come_first_and_half_of_the_way_is_left_to_what_is_fresh() -> None:
    rig = restarted([32, 64], 16, queue_blocks=8)
    hottest = rig.tiers[0].victims(16)[::-1]
    for _ in range(3):
        rig.chain.poll()
    assert under_way(rig) == hottest[:4]
    fresh = rig.store(make_keys(6, start=100))
    rig.chain.poll()
    assert under_way(rig) == [*hottest[:4], *fresh[:4]]
    rig.mover.run_all()
    rig.chain.poll()
    assert under_way(rig) == [*fresh[4:], *hottest[4:6]], "first what waits in the queue"
    rig.settle(20)
    assert rig.resident(1, [*hottest, *fresh]) == [*hottest, *fresh]
    assert behind(rig) == [0]
    assert not rig.chain.has_pending_work


def test_a_step_looks_at_a_bounded_number_of_blocks() -> None:
    count = 5 * LOOKED_AT
    rig = ChainRig([count, count])
    rig.put(0, make_keys(count))
    rig.put(1, make_keys(count))
    rig.restart()
    left = []
    while rig.chain.has_pending_work:
        rig.chain.poll()
        left += behind(rig)
    assert left == [count - LOOKED_AT * step for step in range(1, 6)]
    assert rig.chain.chain_stats().links[0].offered == 0


def test_a_tier_that_is_down_gets_it_when_it_is_well_again() -> None:
    rig = restarted([16, 16], 8)
    for _ in range(200):
        rig.mover.fail_all(Outcome.IO_ERROR)
        rig.chain.poll()
        rig.now += 0.1
    assert not rig.chain.has_pending_work, "no steps for what cannot be done"
    assert rig.chain.chain_stats().links[0].failures == {"io_error": 3 * 4}
    assert behind(rig) == [8]
    rig.now += 2 * REST
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]


def test_a_tier_that_was_down_for_a_whole_life_gets_it_in_the_next() -> None:
    rig = restarted([16, 16, 16], 8)
    for _ in range(3):
        rig.chain.poll()
        rig.mover.fail_all(Outcome.IO_ERROR)
    rig.chain.poll()
    rig.restart()
    rig.settle()
    assert [rig.resident(tier, KEYS[:8]) for tier in (1, 2)] == [KEYS[:8], KEYS[:8]]


def test_one_block_that_cannot_be_written_holds_up_no_other() -> None:
    rig = restarted([16, 16], 8)
    rig.chain.poll()
    rig.mover.run_all({KEYS[3]: Outcome.TIMEOUT})
    rig.settle()
    assert len(rig.resident(1, KEYS[:8])) == 7
    assert not rig.chain.has_pending_work
    rig.load_once(KEYS[:8])
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8], "as with all that was missed"


def test_a_tier_without_room_is_tried_again_now_and_then() -> None:
    rig = restarted([16, 4], 4)
    held = rig.put(1, KEYS[20:24])
    rig.tiers[1].prepare_load(held)
    for _ in range(100):
        rig.settle(1)
        rig.now += PAUSE_S / 5
    assert not rig.chain.has_pending_work
    assert rig.chain.chain_stats().links[0].offered == 5 * 4, "after 0, 1, 3, 7 and 15 seconds"
    rig.tiers[1].complete_load(held)
    rig.now += 16 * PAUSE_S
    rig.settle()
    assert rig.resident(1, KEYS[:4]) == KEYS[:4]


def test_what_finds_no_room_beside_others_that_do_is_tried_again() -> None:
    """Room in a shared bucket is granted piece by piece."""
    rig = restarted([16, 4], 4)
    held = rig.put(1, KEYS[20:22])
    rig.tiers[1].prepare_load(held)
    hottest = rig.tiers[0].victims(4)[::-1]
    rig.settle()
    assert (rig.resident(1, hottest), behind(rig)) == (hottest[:2], [2])
    rig.tiers[1].prepare_load(hottest[:2])
    rig.tiers[1].complete_load(held)
    rig.now += 2 * PAUSE_S
    rig.settle()
    assert rig.resident(1, hottest) == hottest


def test_a_small_tier_gets_the_hottest_alone() -> None:
    """Else every restart would write all that is above there, one block in place of another."""
    rig = restarted([32, 8], 20)
    hottest = rig.tiers[0].victims(20)[::-1]
    rig.settle()
    assert set(rig.resident(1, hottest)) == set(hottest[:8])
    assert (behind(rig), rig.chain.has_pending_work) == ([0], False)
    rig.restart()
    rig.settle()
    assert rig.chain.chain_stats().links[0].offered == 0


def test_until_a_tier_knows_what_it_holds_nothing_is_written_there() -> None:
    rig = restarted([16, 16], 8)
    rig.tiers[1].learning = True
    rig.settle()
    assert rig.chain.has_pending_work
    rig.now += LATER
    rig.settle()
    assert not rig.chain.has_pending_work, "an idle engine is left alone after a while"
    rig.put(1, KEYS[:6])
    rig.tiers[1].learning = False
    rig.settle()
    assert rig.chain.chain_stats().links[0].offered == 2
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]


@pytest.mark.parametrize("everything", [False, True])
def test_what_is_dropped_after_it_was_looked_at_is_not_written(everything: bool) -> None:
    rig = restarted([400, 400], 2 * STEP_BLOCKS, queue_blocks=400)
    rig.chain.poll()
    left = [key for key in make_keys(2 * STEP_BLOCKS) if key not in under_way(rig)]
    if everything:
        rig.chain.clear()
    else:
        rig.chain.forget(left)
    rig.settle()
    assert rig.resident(1, left) == []
    assert rig.chain.chain_stats().links[0].drops == {}
    assert behind(rig) == [0]


def test_what_eviction_takes_first_after_a_restart_is_written_down_before() -> None:
    rig = restarted([16, 32], 16, write=WritePolicy.ON_EVICT)
    rig.settle()
    assert rig.resident(1, KEYS[:16]) == KEYS[14:16]
    assert behind(rig) == [0]


class Vast(Outliving):
    """Has more than anybody may copy, and says how much of it is asked for at once."""

    left = 1_000_000
    asked = 0

    @property
    def recovered(self) -> int:
        return self.left

    def take_recovered(self, count: int) -> tuple[list[BlockKey], list[int]]:
        self.asked = max(self.asked, count)
        self.left -= count
        return make_keys(count, start=self.left), [0] * count


def test_second_touch_counts_the_store_of_the_dead_as_the_first() -> None:
    source, target = (Vast(MemoryStore(NAMESPACE, 8 * SLOT)) for _ in range(2))
    link = StoreLink(LinkPlan(0, 1, WritePolicy.THROUGH, Admission.SECOND_TOUCH), "disk", 64, 64)
    catch_up = CatchUp(link, source, target, 1 << 20)
    for _ in range(4):
        assert catch_up.next(0.0, 64, down=False) == []
    assert (source.asked, 1_000_000 - source.left) == (LOOKED_AT, 4 * LOOKED_AT)
    last = make_keys(3, start=source.left)
    assert link.used(last) == last


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=40), max_size=5), st.integers(1, 50)
)
def test_survivors_of_many_slabs_come_once_each_and_by_their_last_use(
    slabs: list[list[int]], count: int
) -> None:
    survivors = Survivors()
    times: dict[int, int] = {}
    for base, used in enumerate(slabs):
        slots = np.arange(len(used)) + 1000 * base
        used_at = np.sort(np.array(used, np.float64))
        survivors.add(slots, used_at, used_at.astype(np.uint32))
        times |= dict(zip(slots.tolist(), used_at.tolist(), strict=True))
    assert len(survivors) == len(times)
    found: list[int] = []
    while len(survivors):
        slots_now, uses = survivors.take(count)
        assert 0 < len(slots_now) <= count
        assert uses == [times[slot] for slot in slots_now]
        found += slots_now
    assert sorted(found) == sorted(times)
    for base in range(len(slabs)):
        mine = [slot for slot in found if slot // 1000 == base]
        assert mine == sorted(mine, key=lambda slot: (-times[slot], slot))
