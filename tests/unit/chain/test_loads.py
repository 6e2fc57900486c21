"""Loads through a chain: one hop, shared, bounded in time, and failure is a miss."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.tiers.chains import KEYS, LOAD_DEADLINE, REST, ChainRig, rule

from kvtier.chain.ledger import Ticket
from kvtier.chain.plan import COMING, JOINING, NOWHERE
from kvtier.interfaces.mover import TransferKind
from kvtier.settings import WritePolicy
from kvtier.types import BlockKey, Outcome, Presence

HIT, PENDING, MISS = Presence.HIT, Presence.PENDING, Presence.MISS
READ_ONLY = [rule(), rule(WritePolicy.NEVER), rule(WritePolicy.NEVER)]
FAR = 1e9


@pytest.fixture
def rig() -> ChainRig:
    """Eight slots of host memory above two tiers that are only read."""
    return ChainRig([8, 16, 32], READ_ONLY)


def test_a_block_below_is_a_hit_at_once_and_lands_in_host_memory(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:4])
    assert rig.chain.lookup(keys) == [HIT] * 4
    ticket = rig.chain.begin_load(keys, "a", FAR)
    assert ticket.keys == keys
    assert ticket.pending == set(keys)
    assert len(ticket.spec) == 4
    (transfer,) = rig.mover.queue
    assert (transfer.kind, transfer.source, transfer.target) == (TransferKind.LOAD, 1, 0)
    assert transfer.keys == keys, "in the order asked for"
    rig.mover.run_all()
    assert rig.chain.poll() == [ticket]
    assert ticket.landed
    assert not ticket.failed
    rig.check(keys, ticket.spec)
    rig.chain.end_load(ticket)
    rig.assert_quiet()
    assert rig.resident(0, keys) == keys


def test_a_load_has_one_spec_wherever_its_blocks_are(rig: ChainRig) -> None:
    rig.put(0, [KEYS[1], KEYS[4]])
    rig.put(1, [KEYS[0], KEYS[3]])
    rig.put(2, [KEYS[2], KEYS[5]])
    keys = KEYS[:6]
    ticket = rig.chain.begin_load(keys, "a", FAR)
    assert [(t.source, t.keys) for t in rig.mover.queue] == [
        (1, [KEYS[0], KEYS[3]]),
        (2, [KEYS[2], KEYS[5]]),
    ]
    assert ticket.pending == {KEYS[0], KEYS[2], KEYS[3], KEYS[5]}
    rig.mover.run_all()
    rig.chain.poll()
    rig.check(keys, ticket.spec)


@pytest.mark.parametrize("count", [2, 4])
def test_what_has_come_into_host_memory_since_it_was_looked_up_is_pinned_there(
    rig: ChainRig, count: int
) -> None:
    keys = rig.put(1, KEYS[:4])
    assert rig.chain.match_prefix(keys, 16) == 4
    rig.put(0, keys[:count])  # as if a neighbour had
    ticket = rig.chain.begin_load(keys, "a", FAR)
    assert (ticket.keys, ticket.missing) == (keys, [])
    assert ticket.pending == set(keys[count:])
    rig.mover.run_all()
    rig.chain.poll()
    rig.check(keys, ticket.spec)
    rig.chain.end_load(ticket)
    rig.assert_quiet()


def test_a_key_may_be_asked_for_more_than_once(rig: ChainRig) -> None:
    above, below = *rig.put(0, KEYS[:1]), *rig.put(1, KEYS[1:2])
    keys = [above, below, above, below, below]
    ticket = rig.chain.begin_load(keys, "a", FAR)
    rig.mover.run_all()
    assert rig.chain.poll() == [ticket]
    rig.check(keys, ticket.spec)
    rig.chain.end_load(ticket)
    rig.assert_quiet()


def test_what_is_in_host_memory_needs_no_poll(rig: ChainRig) -> None:
    keys = rig.put(0, KEYS[:3])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    assert ticket.landed
    assert not rig.chain.has_pending_work
    assert rig.chain.poll() == []
    assert rig.tiers[0].stats().pinned == 3
    rig.chain.end_load(ticket)
    rig.assert_quiet()


def test_requests_share_what_is_on_its_way(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:4])
    first = rig.chain.begin_load(keys[:3], "a", FAR)
    assert rig.chain.lookup(keys) == [HIT] * 4
    assert rig.chain.locate(keys) == [JOINING] * 3 + [1]
    second = rig.chain.begin_load(keys[1:], "b", FAR)
    assert [transfer.keys for transfer in rig.mover.queue] == [keys[:3], keys[3:]]
    rig.mover.run(rig.mover.queue[0])
    assert rig.chain.poll() == [first]
    assert second.pending == {keys[3]}
    rig.mover.run_all()
    assert rig.chain.poll() == [second]
    rig.check(second.keys, second.spec)
    rig.chain.end_load(first)
    rig.check(second.keys, second.spec)
    assert rig.tiers[0].stats().pinned == 3
    rig.chain.end_load(second)
    rig.assert_quiet()


def test_what_the_engine_is_storing_is_pending(rig: ChainRig) -> None:
    taken = rig.chain.prepare_store(KEYS[:2])
    rig.put(1, KEYS[:1])
    assert rig.chain.lookup(KEYS[:2]) == [PENDING] * 2
    assert rig.chain.locate(KEYS[:2]) == [COMING] * 2
    assert rig.chain.begin_load(KEYS[:2], "a", FAR).missing == KEYS[:2]
    rig.write(0, taken.keys, taken.spec)
    rig.chain.complete_store(taken.keys)
    assert rig.chain.lookup(KEYS[:2]) == [HIT] * 2


def test_what_another_engine_is_storing_below_is_pending(rig: ChainRig) -> None:
    rig.tiers[2].prepare_store(KEYS[:1])
    assert rig.chain.lookup(KEYS[:1]) == [PENDING]


@pytest.mark.parametrize("outcome", [Outcome.GONE, Outcome.CORRUPT])
def test_what_a_tier_cannot_prove_it_offers_no_more(rig: ChainRig, outcome: Outcome) -> None:
    keys = rig.put(1, KEYS[:3])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    rig.mover.run_all({keys[1]: outcome})
    assert rig.chain.poll() == [ticket]
    assert ticket.failed == {keys[1]: outcome}
    assert rig.resident(1, keys) == [keys[0], keys[2]]
    assert rig.chain.lookup(keys) == [HIT, MISS, HIT]
    rig.now += 10 * REST
    rig.chain.poll()
    assert rig.chain.lookup(keys) == [HIT, MISS, HIT]
    assert rig.chain.chain_stats().failures[1] == {outcome.value: 1}


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.DROPPED])
def test_a_key_that_failed_rests(rig: ChainRig, outcome: Outcome) -> None:
    keys = rig.put(1, KEYS[:2])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    rig.mover.run_all({keys[0]: outcome})
    rig.chain.poll()
    assert ticket.failed == {keys[0]: outcome}
    assert rig.resident(1, keys) == keys, "the tier itself still has it"
    rig.chain.end_load(ticket)
    assert rig.chain.lookup(keys) == [MISS, HIT]
    rig.now += REST
    rig.chain.poll()
    assert rig.chain.lookup(keys) == [HIT, HIT]


def test_a_resting_key_may_come_from_further_below(rig: ChainRig) -> None:
    rig.put(1, KEYS[:1])
    rig.put(2, KEYS[:1])
    ticket = rig.chain.begin_load(KEYS[:1], "a", FAR)
    rig.mover.fail_all(Outcome.IO_ERROR)
    rig.chain.poll()
    rig.chain.end_load(ticket)
    assert rig.chain.locate(KEYS[:1]) == [2]


def test_everyone_who_waits_is_told_of_a_failure(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:2])
    tickets = [rig.chain.begin_load(keys, request, FAR) for request in "abc"]
    rig.mover.run_all({keys[0]: Outcome.CORRUPT})
    assert rig.chain.poll() == tickets
    for ticket in tickets:
        assert ticket.failed == {keys[0]: Outcome.CORRUPT}
        rig.check(keys[1:], ticket.spec.select(1, 2))
        rig.chain.end_load(ticket)
    rig.assert_quiet()


def test_many_loads_that_fail_at_once_are_one_failure_of_their_tier(rig: ChainRig) -> None:
    rig.put(1, KEYS[:9])
    tickets = [rig.chain.begin_load([key], "a", FAR) for key in KEYS[:8]]
    rig.mover.fail_all(Outcome.TIMEOUT)
    assert rig.chain.poll() == tickets
    for ticket in tickets:
        rig.chain.end_load(ticket)
    assert rig.chain.lookup([KEYS[8]]) == [MISS]
    rig.now += REST
    rig.chain.poll()
    assert rig.chain.lookup([KEYS[8]]) == [HIT], "it stood still once"


def test_a_late_load_fails_and_is_not_joined(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:2])
    ticket = rig.chain.begin_load(keys, "a", rig.now + 1.0)
    patient = rig.chain.begin_load(keys, "b", FAR)
    assert rig.mover.queue[0].deadline == rig.now + 1.0
    rig.now += 1.0
    assert rig.chain.poll() == [ticket, patient], "the transfer's own deadline is the first's"
    assert ticket.failed == dict.fromkeys(keys, Outcome.TIMEOUT)
    assert rig.mover.cancelled == {rig.mover.queue[0].id}
    assert rig.chain.lookup(keys) == [MISS, MISS]
    assert rig.chain.locate(keys) == [NOWHERE] * 2
    rig.chain.end_load(ticket)
    rig.chain.end_load(patient)
    assert rig.tiers[0].stats().in_flight == 2, "the mover may still write there"
    assert rig.chain.has_pending_work
    rig.mover.run_all()
    assert rig.chain.poll() == []
    assert rig.chain.lookup(keys) == [HIT, HIT], "late, but right"
    rig.assert_quiet()


def test_who_joins_late_waits_for_itself_alone(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:1])
    patient = rig.chain.begin_load(keys, "a", FAR)
    hasty = rig.chain.begin_load(keys, "b", rig.now + 1.0)
    rig.now += 1.0
    assert rig.chain.poll() == [hasty]
    assert rig.mover.cancelled == set(), "somebody still waits for it"
    assert patient.pending == set(keys)
    assert rig.chain.lookup(keys) == [MISS], "nobody new joins what has just been too slow"
    rig.mover.run_all()
    assert rig.chain.poll() == [patient]
    assert patient.failed == {}


def test_a_load_ends_at_its_tiers_deadline_at_the_latest(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:1])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    rig.now += LOAD_DEADLINE
    assert rig.chain.poll() == [ticket]


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.CANCELLED, Outcome.OK])
def test_no_slot_is_reused_under_its_reader(rig: ChainRig, outcome: Outcome) -> None:
    keys = rig.put(1, KEYS[:3])
    readers = [rig.chain.begin_load(keys, "a", rig.now + 1.0) for _ in range(2)]
    rig.now += 2.0
    assert rig.chain.poll() == readers, "late: but who waited may not know it yet"
    rig.mover.run_all({keys[0]: outcome})
    rig.chain.poll()
    for reader in readers:
        for _ in range(2):
            rig.chain.prepare_store(KEYS[20:28])
            rig.chain.complete_store(KEYS[20:28], dict.fromkeys(KEYS[20:28], Outcome.DROPPED))
        owners = rig.tiers[0].store.owners
        assert [owners[slot] for slot in reader.spec.slots] == keys  # type: ignore[attr-defined]
        rig.chain.end_load(reader)
    rig.assert_quiet()
    assert rig.resident(0, keys) == (keys if outcome.ok else keys[1:])


def test_a_reader_may_be_done_before_the_mover_says_so(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:2])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    rig.mover.run_all()
    rig.chain.end_load(ticket)
    assert rig.mover.cancelled == set()
    assert rig.chain.poll() == []
    assert rig.resident(0, keys) == keys
    rig.assert_quiet()


def test_what_a_reader_found_bad_is_not_committed(rig: ChainRig) -> None:
    keys = rig.put(1, KEYS[:3])
    ticket = rig.chain.begin_load(keys, "a", FAR)
    rig.chain.end_load(ticket, {keys[0]: Outcome.CORRUPT})
    rig.mover.run_all()
    rig.chain.poll()
    assert rig.resident(0, keys) == keys[1:]
    assert rig.chain.lookup(keys) == [MISS, HIT, HIT]
    landed = rig.chain.begin_load(keys[1:], "a", FAR)
    rig.chain.end_load(landed, {keys[1]: Outcome.CORRUPT})
    assert rig.resident(0, keys) == keys[2:]
    rig.assert_quiet()


@pytest.mark.parametrize("promised", [False, True])
def test_nothing_makes_room_for_a_mover_that_is_down(promised: bool) -> None:
    """It may take seconds to start again: that must not cost what is in host memory."""
    rig = ChainRig([3, 8])
    rig.put(0, KEYS[:3])
    rig.put(1, KEYS[3:6])
    if promised:
        assert rig.chain.lookup(KEYS[3:6]) == [HIT] * 3
    rig.mover.down = True
    if not promised:
        assert rig.chain.lookup(KEYS[:6]) == [HIT] * 3 + [MISS] * 3
        assert rig.chain.match_prefix(KEYS[3:6], 16) == 0
    ticket = rig.chain.begin_load(KEYS[3:6], "a", FAR)
    assert (ticket.keys, ticket.missing) == ([], KEYS[3:6])
    rig.chain.end_load(ticket)
    rig.chain.poll()
    assert rig.resident(0, KEYS[:3]) == KEYS[:3]
    rig.mover.down = False
    assert rig.chain.lookup(KEYS[3:6]) == [HIT] * 3, "nothing of it was at fault"
    rig.assert_quiet()


def test_a_mover_that_takes_nothing_is_a_miss(rig: ChainRig) -> None:
    rig.put(0, KEYS[:1])
    rig.put(1, KEYS[1:3])
    rig.mover.accepting = False
    ticket = rig.chain.begin_load(KEYS[:3], "a", FAR)
    assert (ticket.keys, ticket.missing) == (KEYS[:1], KEYS[1:3])
    assert ticket.landed
    rig.check(ticket.keys, ticket.spec)
    rig.chain.end_load(ticket)
    rig.assert_quiet()
    assert rig.chain.lookup(KEYS[:3]) == [HIT, MISS, MISS], "not at once again"
    assert rig.chain.chain_stats().failures[1] == {"dropped": 2}


# -- a byte is proved once: by whoever reads it last, or by the mover where nobody else does


CORRUPT, IO_ERROR = Outcome.CORRUPT, Outcome.IO_ERROR


@pytest.fixture
def three_tiers() -> ChainRig:
    """Four slots of host memory, a tier that is written through, and one that is only read."""
    return ChainRig([4, 16, 32], [rule(), rule(), rule(WritePolicy.NEVER)])


def load(three_tiers: ChainRig, keys: Sequence[BlockKey], *, land: bool = True) -> Ticket:
    ticket = three_tiers.chain.begin_load(keys, "reader", FAR, proves=True)
    if land:
        for transfer in three_tiers.mover.loads():
            three_tiers.mover.run(transfer)
        three_tiers.chain.poll()
    return ticket


def corrupt(three_tiers: ChainRig) -> list[int]:
    return [tier.stats().corrupt for tier in three_tiers.tiers]


def test_the_mover_is_spared_what_the_reader_proves_and_nothing_else(three_tiers: ChainRig) -> None:
    three_tiers.put(2, KEYS[:2])
    three_tiers.chain.begin_load(KEYS[:1], "proves", FAR, proves=True)
    three_tiers.chain.begin_load(KEYS[1:2], "does not", FAR)
    assert [transfer.prove for transfer in three_tiers.mover.queue] == [False, True]


@pytest.mark.parametrize("landed", [True, False])
def test_what_the_reader_finds_bad_is_quarantined_where_it_came_from(landed: bool) -> None:
    three_tiers = ChainRig([4, 16, 32], [rule(), *[rule(WritePolicy.NEVER)] * 2])
    three_tiers.put(2, KEYS[:3])
    ticket = load(three_tiers, KEYS[:3], land=landed)
    three_tiers.chain.end_load(ticket, {KEYS[1]: CORRUPT}, proved=[KEYS[0], KEYS[2]])
    three_tiers.settle()
    assert corrupt(three_tiers) == [0, 0, 1]
    assert three_tiers.resident(2, KEYS[:3]) == [KEYS[0], KEYS[2]]
    assert KEYS[1] not in three_tiers.resident(0, KEYS[:3]) + three_tiers.resident(1, KEYS[:3])
    assert three_tiers.chain.chain_stats().failures[2] == {"corrupt": 1}
    three_tiers.assert_quiet()


def test_what_was_right_once_has_gone_bad_in_host_memory(three_tiers: ChainRig) -> None:
    three_tiers.put(2, KEYS[:1])
    three_tiers.chain.end_load(load(three_tiers, KEYS[:1]), proved=KEYS[:1])
    three_tiers.chain.end_load(load(three_tiers, KEYS[:1]), {KEYS[0]: CORRUPT})
    assert corrupt(three_tiers) == [1, 0, 0]
    assert three_tiers.resident(2, KEYS[:1]) == KEYS[:1]


def test_a_load_that_fails_otherwise_blames_no_medium(three_tiers: ChainRig) -> None:
    three_tiers.put(2, KEYS[:1])
    three_tiers.chain.end_load(load(three_tiers, KEYS[:1]), {KEYS[0]: IO_ERROR})
    assert corrupt(three_tiers) == [0, 0, 0]
    assert three_tiers.resident(2, KEYS[:1]) == KEYS[:1]


def test_what_nobody_has_proved_yet_is_proved_before_it_is_written_down(
    three_tiers: ChainRig,
) -> None:
    three_tiers.put(2, KEYS[:1])
    ticket = load(three_tiers, KEYS[:1])
    three_tiers.store(KEYS[1:2])
    three_tiers.chain.poll()
    assert {t.keys[0]: t.prove for t in three_tiers.mover.stores()} == {
        KEYS[0]: True,
        KEYS[1]: False,
    }
    for transfer in three_tiers.mover.stores():
        three_tiers.mover.run(transfer, {KEYS[0]: CORRUPT})
    three_tiers.chain.poll()
    assert corrupt(three_tiers) == [0, 0, 1], "host memory holds what it was given"
    assert [three_tiers.resident(tier, KEYS[:1]) for tier in range(3)] == [[], [], []]
    three_tiers.chain.end_load(ticket, {KEYS[0]: CORRUPT})
    three_tiers.assert_quiet()


def test_what_its_reader_or_the_mover_has_proved_is_not_proved_again(three_tiers: ChainRig) -> None:
    three_tiers.put(2, KEYS[:2])
    three_tiers.chain.end_load(load(three_tiers, KEYS[:1]), proved=KEYS[:1])
    ticket = load(three_tiers, KEYS[1:2])
    three_tiers.settle()
    three_tiers.tiers[1].forget(KEYS[:2])
    three_tiers.chain.end_load(ticket, {KEYS[1]: CORRUPT})
    assert corrupt(three_tiers) == [1, 0, 0], "as the mover proved it when it was written down"
    move, _ = three_tiers.chain._ledger.carry(0, 1, KEYS[:1], FAR)
    assert move is not None
    assert not three_tiers.chain._ledger.deferred_verification.any_of(KEYS[:2])


def test_what_outlived_an_earlier_process_is_proved_before_it_is_written_down(
    three_tiers: ChainRig,
) -> None:
    three_tiers.put(0, KEYS[:2])
    three_tiers.restart()
    three_tiers.chain.poll()
    assert [transfer.prove for transfer in three_tiers.mover.stores()] == [True]


def test_nothing_is_remembered_of_what_host_memory_holds_no_more(three_tiers: ChainRig) -> None:
    deferred_verification = three_tiers.chain._ledger.deferred_verification
    three_tiers.put(2, KEYS[:12])
    for at in range(0, 12, 4):
        three_tiers.chain.end_load(load(three_tiers, KEYS[at : at + 4]))
        three_tiers.settle()
        assert not deferred_verification.any_of(KEYS[:at])
    three_tiers.tiers[1].forget(KEYS[:12])
    three_tiers.chain.end_load(load(three_tiers, KEYS[:4]))
    three_tiers.chain.forget(KEYS[:1])
    assert not deferred_verification.any_of(KEYS[:1])
    load(three_tiers, KEYS[4:8], land=False)
    three_tiers.chain.clear()
    assert not deferred_verification.any_of(KEYS)
