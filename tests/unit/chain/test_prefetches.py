"""What a chain brings into host memory while its request waits, and what becomes of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.tiers.chains import KEYS, LOAD_DEADLINE, ChainRig, is_quiet, rule

from kvtier.chain.hits import Decision
from kvtier.chain.prefetch import LEAST, LONGEST_S, PrefetchShare
from kvtier.chain.stats import PrefetchStats
from kvtier.cost.model import CostModel
from kvtier.settings import PrefetchSettings, WritePolicy
from kvtier.types import BlockKey, Outcome, Presence

SLOTS = 16
HALF = PrefetchSettings(memory=0.5, warmup_share=0.0)
FAR = KEYS[40:]


def waiting(rig: ChainRig, request: str, keys: Sequence[BlockKey]) -> bool:
    """A request waits that will ask for these; whether all of them are begun."""
    rig.chain.prefetches.want(request, keys)
    return rig.chain.prefetches.begin(request)


def over(rig: ChainRig, request: str, *, served: bool = False) -> None:
    rig.chain.prefetches.end(request, served=served)
    rig.chain.poll()


def load(rig: ChainRig, keys: Sequence[BlockKey]) -> None:
    assert rig.chain.lookup(keys) == [Presence.HIT] * len(keys)
    ticket = rig.chain.begin_load(keys, "reader", rig.now + LOAD_DEADLINE)
    assert not ticket.missing
    rig.settle()
    assert not ticket.failed
    rig.check(keys, ticket.spec)
    rig.chain.end_load(ticket)


def stats(rig: ChainRig) -> PrefetchStats:
    return rig.chain.chain_stats().prefetch


def below(keys: Sequence[BlockKey], prefetch: PrefetchSettings = HALF, **how: Any) -> ChainRig:
    """A chain with these keys in its lower tier alone."""
    rig = ChainRig([SLOTS, 64], prefetch=prefetch, **how)
    rig.put(1, keys)
    return rig


def test_what_waits_is_here_when_it_is_asked_for() -> None:
    rig = below(FAR[:4])
    assert waiting(rig, "a", FAR[:4])
    (transfer,) = rig.mover.queue
    assert transfer.prefetch
    rig.settle()
    assert rig.resident(0, FAR[:4]) == FAR[:4]
    load(rig, [*FAR[:4], FAR[0]])
    assert not rig.mover.queue
    over(rig, "a", served=True)
    found = stats(rig)
    assert (found.arrived, found.used, found.wasted) == ([0, 4], [0, 4], [0, 0])
    assert rig.resident(0, FAR[:4]) == FAR[:4]


def test_a_load_joins_what_is_on_its_way_and_nobody_goes_before_it_from_then_on() -> None:
    rig = below(FAR[:4])
    waiting(rig, "a", FAR[:4])
    (transfer,) = rig.mover.queue
    ticket = rig.chain.begin_load(FAR[:2], "a", rig.now + LOAD_DEADLINE)
    assert rig.mover.hastened == [transfer.id]
    over(rig, "a", served=True)
    assert not rig.mover.cancelled
    rig.settle()
    assert ticket.landed
    assert not ticket.failed
    rig.chain.end_load(ticket)
    found = stats(rig)
    assert (found.arrived, found.used, found.wasted) == ([0, 4], [0, 2], [0, 2])
    rig.assert_quiet()


@pytest.mark.parametrize("arrived", [False, True])
def test_an_aborted_request_leaves_nothing_behind(arrived: bool) -> None:
    rig = below(FAR[:4])
    waiting(rig, "a", FAR[:4])
    if arrived:
        rig.settle()
    over(rig, "a")
    assert bool(rig.mover.cancelled) is not arrived
    rig.mover.fail_all(Outcome.CANCELLED)
    rig.settle()
    assert rig.tiers[0].stats().blocks == 0
    assert rig.resident(1, FAR[:4]) == FAR[:4]
    found = stats(rig)
    assert found.wasted == [0, 4 * arrived]
    assert found.cancelled == [0, 4 * (not arrived)]
    assert rig.chain.chain_stats().failures == [{}, {}]
    rig.assert_quiet()
    assert not rig.chain.has_pending_work


def test_what_another_request_waits_for_stays() -> None:
    rig = below(FAR[:4])
    waiting(rig, "a", FAR[:4])
    assert waiting(rig, "b", FAR[:4])
    over(rig, "a")
    assert not rig.mover.cancelled
    rig.settle()
    assert rig.resident(0, FAR[:4]) == FAR[:4]
    over(rig, "b")
    assert rig.tiers[0].stats().blocks == 0


def test_it_holds_no_more_than_its_share() -> None:
    rig = below(FAR[:20])
    assert not waiting(rig, "a", FAR[:20])
    rig.settle()
    assert rig.tiers[0].stats().blocks == SLOTS // 2
    assert not rig.chain.prefetches.begin("a")
    load(rig, FAR[:4])
    assert not rig.chain.prefetches.begin("a")
    rig.settle()
    assert rig.resident(0, FAR[:20]) == FAR[:12]


def test_it_evicts_nothing_that_is_pinned_or_that_another_waits_for() -> None:
    rig = below(FAR[:8])
    rig.store(KEYS[:SLOTS])  # of which the last go first
    rig.settle()
    pinned = rig.chain.begin_load(KEYS[14:16], "reader", rig.now + LOAD_DEADLINE)
    waiting(rig, "before", KEYS[10:12])
    assert not waiting(rig, "a", FAR[:8])
    rig.settle()
    assert rig.resident(0, KEYS[:16]) == [*KEYS[:12], *KEYS[14:16]]
    assert rig.resident(0, FAR[:8]) == FAR[:2]
    rig.chain.end_load(pinned)


def test_it_evicts_nothing_that_is_nowhere_else_yet() -> None:
    rig = ChainRig([SLOTS, 64], [rule(), rule(WritePolicy.ON_EVICT)], prefetch=HALF)
    rig.put(1, FAR[:8])
    rig.mover.accepting = False
    rig.store(KEYS[:SLOTS])
    rig.chain.poll()
    rig.mover.accepting = True
    assert not waiting(rig, "a", FAR[:8])
    assert rig.resident(0, KEYS[:SLOTS]) == KEYS[:SLOTS]


def test_a_block_that_is_likely_to_be_used_before_gives_way_to_none() -> None:
    rig = below(FAR[:8])
    rig.store(KEYS[:SLOTS])
    rig.settle()
    asked: list[tuple[float, float]] = []

    def hot(count: int, seconds: float, chance: float) -> list[BlockKey]:
        asked.append((seconds, chance))
        return [key for key in rig.tiers[0].victims(count) if key in KEYS[13:16]]

    rig.tiers[0].victims_within = hot  # type: ignore[method-assign]
    assert not waiting(rig, "a", FAR[:8])
    rig.settle()
    assert rig.resident(0, FAR[:8]) == FAR[:3]
    assert asked[0][1] == 1.0


def test_a_load_that_lacks_room_takes_it_from_prefetches() -> None:
    rig = below(FAR[:24])
    waiting(rig, "a", FAR[:8])
    wanted = FAR[8:20]
    count = rig.chain.match_prefix(wanted, 16)
    assert count == SLOTS // 2
    assert rig.chain.prefetches.holds_room
    rig.chain.poll()
    (transfer,) = rig.mover.queue
    assert rig.mover.cancelled == {transfer.id}
    rig.mover.fail_all(Outcome.CANCELLED)
    rig.chain.poll()
    assert rig.chain.match_prefix(wanted, 16) == len(wanted)


def test_what_was_cancelled_can_be_had_again_in_a_moment() -> None:
    rig = below(FAR[:4])
    waiting(rig, "a", FAR[:4])
    over(rig, "a")
    decision = Decision()
    assert rig.chain.match_prefix(FAR[:4], 16, 0, decision) == 0
    assert decision.short_of_room
    assert rig.chain.prefetches.holds_room
    rig.mover.fail_all(Outcome.CANCELLED)
    rig.chain.poll()
    assert rig.chain.match_prefix(FAR[:4], 16, 0, decision) == 4
    assert not decision.short_of_room


def test_blocks_of_a_mover_that_died_are_asked_for_again() -> None:
    rig = below(FAR[:4])
    waiting(rig, "a", FAR[:4])
    rig.mover.fail_all(Outcome.DROPPED)
    rig.chain.poll()
    assert rig.chain.lookup(FAR[:4]) == [Presence.HIT] * 4


def test_tiers_between_are_offered_what_is_used_alone() -> None:
    rig = ChainRig([SLOTS, 64, 64], prefetch=HALF)
    rig.put(2, FAR[:8])
    waiting(rig, "a", FAR[:8])
    rig.settle()
    load(rig, FAR[:3])
    over(rig, "a")
    rig.settle()
    assert rig.resident(1, FAR[:8]) == FAR[:3]


def test_what_comes_too_late_is_given_up_and_is_no_failure_of_its_tier() -> None:
    rig = below(FAR[:4])
    waiting(rig, "a", FAR[:4])
    rig.now += LOAD_DEADLINE
    rig.chain.poll()
    (transfer,) = rig.mover.queue
    assert rig.mover.cancelled == {transfer.id}
    rig.mover.fail_all(Outcome.CANCELLED)
    rig.chain.poll()
    assert rig.chain.lookup(FAR[:4]) == [Presence.HIT] * 4
    assert rig.chain.chain_stats().down == [False, False]


def test_a_prefetch_that_has_not_come_is_weighed_as_a_load() -> None:
    costs = CostModel(clock=lambda: 1000.0)
    rig = below(FAR[:4], costs=costs)
    costs.observe_prefill(1024, 0.001)
    costs.observe_load("memory", rig.tiers[1].stats().bytes_capacity, 100.0)
    waiting(rig, "a", FAR[:4])
    assert rig.chain.match_prefix(FAR[:4], 16) == 0
    rig.settle()
    assert rig.chain.match_prefix(FAR[:4], 16) == 4


def test_wrong_prefetches_lower_the_share_and_right_ones_bring_it_back() -> None:
    share = PrefetchShare(64)
    assert share.blocks == 64
    share.wasted(64)
    assert share.blocks == 32
    for _ in range(6):
        share.wasted(64)
    assert share.blocks == 64 * LEAST
    for _ in range(32):
        share.used(4)
    assert share.blocks > 48
    assert PrefetchShare(0).blocks == 0


def test_after_a_reset_nothing_is_expected_any_more() -> None:
    rig = below(FAR[:8])
    waiting(rig, "a", FAR[:4])
    rig.settle()
    waiting(rig, "b", FAR[4:8])
    rig.chain.clear()
    rig.mover.run_all()
    rig.settle()
    assert rig.tiers[0].stats().blocks == 0
    over(rig, "a")
    over(rig, "b")
    rig.assert_quiet()
    assert is_quiet(rig.chain._ledger)
    assert not rig.chain.has_pending_work


def test_without_settings_nothing_is_brought() -> None:
    rig = ChainRig([SLOTS, 64])
    rig.put(1, FAR[:4])
    assert not rig.chain.prefetches.on
    assert not waiting(rig, "a", FAR[:4])
    assert not rig.mover.queue


def test_a_storm_of_requests_that_are_aborted_leaves_nothing_and_spoils_little() -> None:
    rig = below([])
    rig.store(KEYS[:SLOTS])
    rig.settle()
    for start in range(0, 24, 4):
        keys = FAR[start : start + 4]
        rig.put(1, keys)
        waiting(rig, f"hostile {start}", keys)
        if start % 8:
            rig.settle()
        over(rig, f"hostile {start}")
        rig.mover.fail_all(Outcome.CANCELLED)
        rig.settle()
    assert len(rig.resident(0, KEYS[:SLOTS])) >= SLOTS - 4
    assert rig.resident(0, FAR) == []
    assert rig.chain.prefetches.share.blocks < SLOTS // 2
    prefetches = rig.chain.prefetches
    for held in (prefetches._requests, prefetches._wanted, prefetches._unused, prefetches._moves):
        assert not held
    assert not prefetches._joined
    assert prefetches._bytes == [0, 0]
    rig.assert_quiet()


# -- what a chain brings into host memory after a start


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
