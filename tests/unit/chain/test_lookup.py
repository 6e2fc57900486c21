"""What a chain promises on lookup, what it counts, and what becomes of a promise."""

from __future__ import annotations

import pytest
from support.tiers.chains import KEYS, SLOT, ChainRig, rule

from kvtier.chain import stats
from kvtier.chain.ledger import Move, SettledMove
from kvtier.chain.plan import COMING, HOST, JOINING, NOWHERE
from kvtier.chain.stats import ChainCounters, Sample, direct
from kvtier.cost.model import CostModel
from kvtier.cost.rates import DEVICE
from kvtier.interfaces.mover import Transfer, TransferKind, TransferResult
from kvtier.settings import WritePolicy
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Outcome, Presence, SlotSpec

HIT, PENDING, MISS = Presence.HIT, Presence.PENDING, Presence.MISS
READ_ONLY = [rule(), rule(WritePolicy.NEVER), rule(WritePolicy.NEVER)]
FAR = 1e9


@pytest.fixture
def rig() -> ChainRig:
    """Eight slots of host memory above two tiers that are only read."""
    return ChainRig([8, 16, 32], READ_ONLY)


def test_no_more_is_promised_than_host_memory_can_take(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:12])
    assert rig.chain.lookup(keys) == [HIT] * 8 + [MISS] * 4
    assert [rig.chain.lookup([key]) for key in keys] == [[HIT]] * 8 + [[MISS]] * 4
    ticket = rig.chain.begin_load(keys[:8], "a", FAR)
    assert ticket.missing == []
    rig.chain.poll()
    assert rig.chain.lookup(keys[8:]) == [MISS] * 4, "all slots are taken"
    rig.mover.run_all()
    rig.chain.poll()
    assert rig.chain.lookup(keys[8:]) == [MISS] * 4, "and pinned"
    rig.chain.end_load(ticket)
    assert rig.chain.lookup(keys[8:]) == [HIT] * 4


def test_no_more_is_promised_than_the_mover_takes() -> None:
    rig = ChainRig([32, 16], [rule(), rule(WritePolicy.NEVER, queue_blocks=4)])
    above, below = rig.put(0, KEYS[:2]), rig.put(1, KEYS[2:12])
    assert rig.chain.lookup([*above, *below]) == [HIT] * 6 + [MISS] * 6
    assert rig.chain.match_prefix([*above, *below], 16) == 6
    first = rig.chain.begin_load(below[:3], "a", FAR)
    assert rig.chain.lookup(below[3:]) == [HIT] + [MISS] * 6, "three of four are under way"
    second = rig.chain.begin_load([*above, below[3]], "b", FAR)
    assert not first.missing + second.missing
    rig.chain.poll()
    assert rig.chain.lookup(below[4:]) == [MISS] * 6
    rig.mover.run_all()
    rig.chain.poll()
    assert rig.chain.lookup(below[4:]) == [HIT] * 4 + [MISS] * 2
    rig.chain.begin_load(below[4:8], "c", FAR)
    rig.mover.fail_all(Outcome.DROPPED)
    rig.chain.poll()
    assert rig.chain.lookup(below[8:]) == [HIT] * 2, "what has failed is under way no more"


def test_what_was_promised_and_evicted_is_no_hit(rig: ChainRig) -> None:
    keys = rig.put(0, KEYS[:8])
    assert rig.chain.lookup(keys) == [HIT] * 8
    taken = rig.chain.prepare_store(KEYS[20:24])
    assert len(taken.evicted) == 4
    gone = set(taken.evicted)
    assert rig.chain.lookup(keys) == [MISS if key in gone else HIT for key in keys]
    ticket = rig.chain.begin_load(keys, "a", FAR)
    assert set(ticket.missing) == gone


@pytest.mark.parametrize("by", ["reader", "mover"])
def test_what_was_found_bad_is_no_hit_while_another_one_reads_it(by: str) -> None:
    """It could be had from below, but not under its key while its slot is taken."""
    rig = ChainRig([8, 16, 32], [rule(), rule(), rule(WritePolicy.NEVER)])
    keys = rig.put(2, KEYS[:1])
    rig.store(keys)
    rig.chain.poll()
    reading, failing = (rig.chain.begin_load(keys, name, FAR) for name in "ab")
    if by == "reader":
        rig.chain.end_load(failing, {keys[0]: Outcome.CORRUPT})
    else:
        rig.chain.end_load(failing)
        rig.mover.run_all({keys[0]: Outcome.CORRUPT})
    for _ in range(2):
        rig.chain.poll()
        assert rig.chain.lookup(keys) == [MISS]
    rig.chain.end_load(reading)
    rig.settle()
    rig.tiers[1].forget(keys)
    assert rig.chain.lookup(keys) == [HIT]
    ticket = rig.chain.begin_load(keys, "c", FAR)
    assert not ticket.missing
    rig.mover.run_all()
    assert rig.chain.poll() == [ticket]
    rig.check(ticket.keys, ticket.spec)


@pytest.mark.parametrize("way", ["forget", "clear"])
def test_what_was_promised_and_dropped_is_no_hit(rig: ChainRig, way: str) -> None:
    above, below = rig.put(0, KEYS[:2]), rig.put(1, KEYS[2:4])
    keys = [*above, *below]
    assert rig.chain.lookup(keys) == [HIT] * 4
    if way == "forget":
        rig.chain.forget(keys)
    else:
        rig.chain.clear()
    assert rig.chain.lookup(keys) == [MISS] * 4


def test_a_block_that_left_host_memory_meanwhile_comes_from_below(rig: ChainRig) -> None:
    rig.put(1, KEYS[:1])
    rig.put(0, KEYS[:1])
    assert rig.chain.lookup(KEYS[:1]) == [HIT]
    rig.tiers[0].forget(KEYS[:1])
    ticket = rig.chain.begin_load(KEYS[:1], "a", FAR)
    assert ticket.pending == {KEYS[0]}


def test_a_block_that_left_a_shared_tier_meanwhile_is_missing(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:3])
    assert rig.chain.lookup(keys) == [HIT] * 3
    rig.tiers[1].forget(keys[1:2])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    assert ticket.missing == keys[1:2]
    rig.mover.run_all()
    rig.chain.poll()
    rig.check(ticket.keys, ticket.spec)


def test_what_is_dropped_while_pinned_waits_for_its_slot(rig: ChainRig) -> None:
    keys = rig.put(0, KEYS[:2])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    rig.chain.forget(keys[:1])
    rig.put(1, keys[:1])
    assert rig.chain.lookup(keys) == [MISS, HIT]
    rig.check(keys, ticket.spec)
    rig.chain.end_load(ticket)
    rig.chain.poll()
    assert rig.chain.lookup(keys) == [HIT, HIT]


def test_what_is_read_from_files_takes_no_slot_that_was_promised() -> None:
    rig = ChainRig([2, 4, 4], READ_ONLY, in_files=[1])
    chain = rig.chain
    chain.read_directly(True)
    keys = [*rig.put(1, KEYS[:1]), *rig.put(2, KEYS[1:3])]
    first = chain.begin_load(keys[:1], "a", FAR)
    assert list(first.files) == keys[:1]
    chain.end_load(first)
    assert chain.lookup(keys) == [HIT] * 3
    again = chain.begin_load(keys, "b", FAR)
    assert not again.missing, "used again, it would be worth a slot, but there is none to spare"
    assert (list(again.files), list(again.keys)) == (keys[:1], keys[1:])


def test_a_read_that_ends_when_files_are_read_no_more_says_nothing_of_the_mover() -> None:
    """Readers say in one breath that a read has failed late, and that they will read no more."""
    costs = CostModel(clock=lambda: 1000.0)
    rig = ChainRig([4, 4], READ_ONLY[:2], costs=costs, in_files=[1])
    chain = rig.chain
    chain.read_directly(True)
    keys = rig.put(1, KEYS[:2])
    ticket = chain.begin_load(keys, "a", FAR)
    assert list(ticket.files) == keys
    chain.read_directly(False)
    chain.end_load(ticket, dict.fromkeys(keys, Outcome.IO_ERROR), (0, 5.0))
    medium = rig.tiers[1].medium
    assert costs.load_seconds(direct(medium), SLOT) > 1.0
    assert costs.load_seconds(medium, SLOT) < 0.1


def test_the_worth_of_a_prefix_is_its_unbroken_head(rig: ChainRig) -> None:
    rig.put(0, KEYS[:2])
    rig.put(1, [*KEYS[2:4], KEYS[5]])
    assert rig.chain.match_prefix(KEYS[:6], 256) == 4
    assert rig.chain.match_prefix(KEYS[10:12], 256) == 0
    rig.put(1, KEYS[6:14])
    rig.chain.poll()
    assert rig.chain.match_prefix([*KEYS[:4], *KEYS[6:14]], 256) == 8, (
        "no more than there is room for"
    )


def test_costs_decide_and_are_told(rig: ChainRig) -> None:
    costs = CostModel(clock=lambda: rig.now)
    costed = ChainRig([8, 16], READ_ONLY[:2], costs=costs, clock=lambda: rig.now)
    keys = costed.put(1, KEYS[:4])
    medium = costed.tiers[1].medium
    costs.observe_prefill(1024, 1.0)
    assert costed.chain.match_prefix(keys, 256) == 4
    costed.chain.begin_load(keys, "a", FAR)
    costed.mover.run_all()
    costed.chain.poll()
    assert costs.stats()[medium].samples == 1
    assert costs.stats()[medium].taken == 4
    for _ in range(20):
        costs.observe_load(medium, 4096, 1000.0)
    assert costed.chain.match_prefix(KEYS[:4], 256) == 4, "they are in host memory now"
    assert costs.stats()[DEVICE].taken == 4
    other = costed.put(1, KEYS[10:12])
    rig.now += 1.0
    assert costed.chain.match_prefix(other, 256) <= 1, (
        "slower than computing them again, but for a probe"
    )


def test_two_tiers_of_a_kind_are_judged_apart(rig: ChainRig) -> None:
    costs = CostModel(clock=lambda: rig.now)
    costed = ChainRig([8, 16, 16], READ_ONLY, costs=costs, clock=lambda: rig.now)
    near, far = costed.put(1, KEYS[:4]), costed.put(2, KEYS[4:8])
    costs.observe_prefill(1024, 1.0)
    for _ in range(3):
        costs.observe_load(f"{costed.tiers[2].medium} 2", 4096, 1000.0)
    assert costed.chain.match_prefix([*near, *far], 256) == len(near)
    costed.chain.begin_load(near, "a", FAR)
    costed.mover.run_all()
    costed.chain.poll()
    samples = {name: link.samples for name, link in costs.stats().items()}
    assert (samples["memory"], samples["memory 2"]) == (1, 3)


def test_a_load_is_late_only_if_it_was_not_there_when_asked_for() -> None:
    """A step may take longer than all loads of the step before: those have ended, unheard."""
    now = [1000.0]
    costs = CostModel(clock=lambda: now[0])
    rig = ChainRig([8, 16], READ_ONLY[:2], costs=costs, clock=lambda: now[0])
    keys = rig.put(1, KEYS[:6])
    costs.observe_prefill(1024, 1.0)
    costs.observe_load(rig.tiers[1].medium, 4096, 0.01)
    assert rig.chain.match_prefix(keys[:1], 256) == 1
    rig.chain.begin_load(keys[:1], "a", FAR)
    rig.chain.poll()
    now[0] += 3.0
    assert rig.chain.match_prefix(keys[1:3], 256) == 2, "nobody has asked since"
    rig.chain.poll()
    assert rig.chain.match_prefix(keys[3:], 256) == 0, "it is late for certain"


def test_a_load_that_fails_at_once_says_nothing_of_speed(rig: ChainRig) -> None:
    costs = CostModel(clock=lambda: rig.now)
    costed = ChainRig([8, 16], READ_ONLY[:2], costs=costs, clock=lambda: rig.now)
    keys = costed.put(1, KEYS[:4])
    medium = costed.tiers[1].medium
    costs.observe_load(medium, 4096, 1000.0)
    costed.chain.begin_load(keys[:2], "a", FAR)
    costed.mover.fail_all(Outcome.CORRUPT)
    costed.chain.poll()
    assert costs.stats()[medium].samples == 1
    costed.chain.begin_load(keys[2:], "b", FAR)
    costed.mover.run_all()
    costed.chain.poll()
    assert costs.stats()[medium].samples == 2


def test_hits_are_counted_where_they_were_found(rig: ChainRig) -> None:
    rig.put(0, KEYS[:1])
    rig.put(1, KEYS[1:3])
    rig.put(2, KEYS[3:6])
    rig.chain.begin_load(KEYS[:6], "a", FAR)
    rig.chain.begin_load(KEYS[4:6], "b", FAR)
    stats = rig.chain.chain_stats()
    assert stats.hits == [1, 2, 5]
    assert stats.hit_bytes == [8192 * count for count in stats.hits]
    assert HOST == 0
    rig.mover.run_all()
    rig.chain.poll()
    samples = rig.chain.take_samples()
    media = [tier.medium for tier in rig.tiers]
    assert [(s.source, s.target) for s in samples] == [(media[1], media[0]), (media[2], media[0])]
    assert rig.chain.take_samples() == []


# -- what a chain counts of its loads, and for how long it keeps what nobody has asked for


MEDIA = ["cpu", "disk", "bucket"]


def end_a_load(counts: ChainCounters, number: int, source: int) -> None:
    spec = SlotSpec([0])
    transfer = Transfer(
        id=number,
        kind=TransferKind.LOAD,
        source=source,
        target=0,
        keys=make_keys(1),
        source_spec=spec,
        target_spec=spec,
        deadline=1e9,
    )
    result = TransferResult(
        id=number, outcomes=[Outcome.OK], bytes_moved=1, seconds=float(number), busy_seconds=0.0
    )
    counts.ended(SettledMove(Move(transfer), [], {}, {}, []), result)


def test_a_tier_misses_what_it_was_asked_for_and_what_is_on_its_way_is_no_miss() -> None:
    counts = ChainCounters(MEDIA, NAMESPACE)
    counts.looked_up([0, 1, 1, 2, NOWHERE, COMING, JOINING])
    assert counts.misses == [5, 3, 2]


def test_samples_say_where_from_and_only_the_latest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stats, "SAMPLES_KEPT", 3)
    counts = ChainCounters(MEDIA, NAMESPACE)
    for number in range(5):
        end_a_load(counts, number, source=1 + number % 2)
    assert counts.take_samples() == [
        Sample("disk", "cpu", 2.0),
        Sample("bucket", "cpu", 3.0),
        Sample("disk", "cpu", 4.0),
    ]


def test_what_was_told_once_stays_as_it_was_told(rig: ChainRig) -> None:
    counts = rig.context.counters
    counts.found(1, make_keys(2))
    counts.failed(1, [Outcome.GONE])
    told = rig.chain.chain_stats()
    counts.looked_up([NOWHERE])
    counts.found(1, make_keys(3))
    counts.failed(1, [Outcome.GONE, Outcome.CORRUPT])
    assert (told.hits, told.misses) == ([0, 2, 0], [0, 0, 0])
    assert told.hit_bytes == [0, 2 * NAMESPACE.payload_bytes, 0]
    assert told.failures == [{}, {"gone": 1}, {}]
    assert counts.failures == [{}, {"gone": 2, "corrupt": 1}, {}]
