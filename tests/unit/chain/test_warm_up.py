"""What a chain brings into host memory after a start."""

from __future__ import annotations

from support.tiers.chains import KEYS, LOAD_DEADLINE, ChainRig

from kvtier.chain.prefetch import LONGEST_S
from kvtier.settings import PrefetchSettings
from kvtier.types import Outcome

WARM = PrefetchSettings(warmup_share=0.75)


def restarted(settings: PrefetchSettings = WARM) -> ChainRig:
    """A process that finds its lower tier full, and its host memory empty."""
    rig = ChainRig([16, 64], prefetch=settings)
    rig.put(1, KEYS[:40])
    rig.restart()
    return rig


def test_the_hottest_blocks_fill_a_part_of_host_memory() -> None:
    rig = restarted()
    rig.chain.poll()
    assert all(transfer.prefetch for transfer in rig.mover.queue)
    assert rig.chain.has_pending_work
    rig.settle()
    assert rig.resident(0, KEYS) == KEYS[:12]
    assert rig.chain.chain_stats().prefetch.warmed == [0, 12]
    assert not rig.chain.has_pending_work
    assert rig.tiers[1].hottest == []


def test_it_can_be_turned_off() -> None:
    rig = restarted(PrefetchSettings(warmup_share=0.0))
    rig.settle()
    assert rig.tiers[0].stats().blocks == 0
    assert not rig.chain.has_pending_work


def test_it_waits_while_a_load_or_a_prefetch_is_under_way() -> None:
    rig = restarted()
    ticket = rig.chain.begin_load(KEYS[:2], "reader", rig.now + LOAD_DEADLINE)
    rig.chain.prefetches.want("waits", KEYS[2:4])
    rig.chain.prefetches.begin("waits")
    rig.chain.poll()
    assert [list(each.keys) for each in rig.mover.queue] == [KEYS[:2], KEYS[2:4]]
    rig.settle()
    assert rig.chain.chain_stats().prefetch.warmed[1] > 0
    rig.chain.end_load(ticket)


def test_a_load_that_lacks_room_gets_it() -> None:
    rig = restarted(PrefetchSettings(warmup_share=1.0))
    rig.chain.poll()
    under_way = {each.id for each in rig.mover.queue}
    assert rig.chain.match_prefix(KEYS[20:36], 16) < 16
    rig.chain.poll()
    assert rig.mover.cancelled == under_way
    rig.mover.fail_all(Outcome.CANCELLED)
    rig.chain.poll()


def test_it_pushes_nothing_out() -> None:
    rig = restarted()
    rig.store(KEYS[48:60])
    rig.settle()
    assert rig.resident(0, KEYS) == KEYS[48:60]
    assert not rig.chain.has_pending_work


def test_it_ends_when_nothing_is_found_and_after_a_long_time() -> None:
    rig = ChainRig([16, 64], prefetch=WARM)
    assert not rig.chain.has_pending_work
    rig.put(1, KEYS[:2])
    rig.restart()
    rig.settle()
    assert not rig.chain.has_pending_work
    rig = restarted()
    rig.chain.poll()
    rig.now += LONGEST_S + 1
    rig.chain.poll()
    assert rig.tiers[1].hottest == []


def test_a_reset_ends_it() -> None:
    rig = restarted()
    rig.chain.poll()
    rig.chain.clear()
    rig.mover.run_all()
    rig.settle()
    assert rig.tiers[0].stats().blocks == 0
    assert not rig.chain.has_pending_work
