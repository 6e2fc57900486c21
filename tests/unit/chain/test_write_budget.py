"""A chain whose lower tier may only be written so much."""

from __future__ import annotations

from support.tiers.chains import KEYS, SLOT, ChainRig, rule

from kvtier.interfaces.write_budget import WriteAllowance
from kvtier.settings import WritePolicy

FAR = 1e12


def rig_with(shared: float, lease: float, write: WritePolicy = WritePolicy.THROUGH) -> ChainRig:
    rig = ChainRig([16, 64], [rule(), rule(write=write)])
    allowance = WriteAllowance(1.0, FAR, SLOT)
    allowance.tell(shared, 0.0, 0.0)
    allowance.grant(lease)
    rig.tiers[1].allowance = allowance
    rig._begin()
    return rig


def allowance_of(rig: ChainRig) -> WriteAllowance:
    assert rig.tiers[1].allowance is not None
    return rig.tiers[1].allowance


def drops(rig: ChainRig) -> dict[str, int]:
    return rig.chain.chain_stats().links[0].drops


def test_with_room_for_all_it_is_written_through() -> None:
    rig = rig_with(FAR, FAR)
    rig.chain.touch(KEYS[:8])
    rig.store(KEYS[:8])
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]
    assert drops(rig) == {}


def test_with_nothing_left_nothing_is_written_and_nobody_waits() -> None:
    rig = rig_with(0.0, 0.0)
    rig.store(KEYS[:8])
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == []
    assert drops(rig) == {"budget": 8}
    assert not rig.chain.has_pending_work


def test_what_was_chosen_waits_for_its_lease() -> None:
    rig = rig_with(FAR, 3 * SLOT)
    calls: list[int] = []
    allowance_of(rig).when_short = lambda: calls.append(1)
    rig.store(KEYS[:8])
    rig.chain.poll()
    assert [len(transfer.keys) for transfer in rig.mover.stores()] == [3]
    assert calls == [1]
    assert rig.chain.has_pending_work
    assert allowance_of(rig).take_wanted() >= 8 * SLOT
    allowance_of(rig).grant(5 * SLOT)
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]
    assert not rig.chain.has_pending_work


def test_an_idle_engine_does_not_step_for_a_budget_that_others_have_used_up() -> None:
    rig = rig_with(FAR, 0.0)
    rig.store(KEYS[:8])
    rig.chain.poll()
    allowance_of(rig).tell(0.0, 0.0, 0.0)
    assert not rig.chain.has_pending_work
    allowance_of(rig).grant(FAR)
    assert rig.chain.has_pending_work
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == KEYS[:8]


def test_each_use_is_one_more_chance() -> None:
    rig = rig_with(0.0, 0.0)
    rig.store(KEYS[:4])
    rig.settle()
    allowance_of(rig).grant(FAR)
    rig.now += 2.0
    rig.chain.touch(KEYS[:4])
    rig.settle()
    assert rig.resident(1, KEYS[:4]) == KEYS[:4]


def test_what_is_evicted_is_written_within_it_too() -> None:
    kept = []
    for lease in (None, FAR, 0.0):
        rig = rig_with(0.0, lease or 0.0, WritePolicy.ON_EVICT)
        if lease is None:
            rig.tiers[1].allowance = None
            rig._begin()
        for start in range(0, 24, 4):
            rig.chain.touch(KEYS[start : start + 4])
            rig.store(KEYS[start : start + 4])
            rig.settle()
            rig.now += 2.0
        kept.append(rig.resident(1, KEYS))
        assert not rig.chain.has_pending_work
    assert kept[0] == kept[1] != []
    assert kept[2] == []


def test_what_a_disk_may_not_take_reaches_the_store_below_all_the_same() -> None:
    rig = ChainRig([16, 64, 64])
    rig.tiers[1].allowance = WriteAllowance(1.0, FAR, SLOT)
    rig._begin()
    rig.store(KEYS[:8])
    rig.settle()
    assert rig.resident(1, KEYS[:8]) == []
    assert rig.resident(2, KEYS[:8]) == KEYS[:8]


def test_what_outlived_a_restart_comes_down_within_it() -> None:
    for lease in (FAR, 0.0):
        rig = rig_with(lease, lease)
        rig.put(0, KEYS[:8])
        rig.restart()
        allowance = WriteAllowance(1.0, FAR, SLOT)
        allowance.tell(lease, 0.0, 0.0)
        allowance.grant(lease)
        rig.tiers[1].allowance = allowance
        rig._begin()
        rig.settle()
        assert len(rig.resident(1, KEYS[:8])) == (8 if lease else 0)
        assert not rig.chain.has_pending_work
