"""A byte is proved once: by whoever reads it last, or by the mover where nobody else does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.tiers.chains import KEYS, ChainRig, rule

from kvtier.chain.ledger import Ticket
from kvtier.settings import WritePolicy
from kvtier.types import BlockKey, Outcome

FAR = 1e9
CORRUPT, IO_ERROR = Outcome.CORRUPT, Outcome.IO_ERROR


@pytest.fixture
def rig() -> ChainRig:
    """Four slots of host memory, a tier that is written through, and one that is only read."""
    return ChainRig([4, 16, 32], [rule(), rule(), rule(WritePolicy.NEVER)])


def load(rig: ChainRig, keys: Sequence[BlockKey], *, land: bool = True) -> Ticket:
    ticket = rig.chain.begin_load(keys, "reader", FAR, proves=True)
    if land:
        for transfer in rig.mover.loads():
            rig.mover.run(transfer)
        rig.chain.poll()
    return ticket


def corrupt(rig: ChainRig) -> list[int]:
    return [tier.stats().corrupt for tier in rig.tiers]


def test_the_mover_is_spared_what_the_reader_proves_and_nothing_else(rig: ChainRig) -> None:
    rig.put(2, KEYS[:2])
    rig.chain.begin_load(KEYS[:1], "proves", FAR, proves=True)
    rig.chain.begin_load(KEYS[1:2], "does not", FAR)
    assert [transfer.prove for transfer in rig.mover.queue] == [False, True]


@pytest.mark.parametrize("landed", [True, False])
def test_what_the_reader_finds_bad_is_quarantined_where_it_came_from(landed: bool) -> None:
    rig = ChainRig([4, 16, 32], [rule(), *[rule(WritePolicy.NEVER)] * 2])
    rig.put(2, KEYS[:3])
    ticket = load(rig, KEYS[:3], land=landed)
    rig.chain.end_load(ticket, {KEYS[1]: CORRUPT}, proved=[KEYS[0], KEYS[2]])
    rig.settle()
    assert corrupt(rig) == [0, 0, 1]
    assert rig.resident(2, KEYS[:3]) == [KEYS[0], KEYS[2]]
    assert KEYS[1] not in rig.resident(0, KEYS[:3]) + rig.resident(1, KEYS[:3])
    assert rig.chain.chain_stats().failures[2] == {"corrupt": 1}
    rig.assert_quiet()


def test_what_was_right_once_has_gone_bad_in_host_memory(rig: ChainRig) -> None:
    rig.put(2, KEYS[:1])
    rig.chain.end_load(load(rig, KEYS[:1]), proved=KEYS[:1])
    rig.chain.end_load(load(rig, KEYS[:1]), {KEYS[0]: CORRUPT})
    assert corrupt(rig) == [1, 0, 0]
    assert rig.resident(2, KEYS[:1]) == KEYS[:1]


def test_a_load_that_fails_otherwise_blames_no_medium(rig: ChainRig) -> None:
    rig.put(2, KEYS[:1])
    rig.chain.end_load(load(rig, KEYS[:1]), {KEYS[0]: IO_ERROR})
    assert corrupt(rig) == [0, 0, 0]
    assert rig.resident(2, KEYS[:1]) == KEYS[:1]


def test_what_nobody_has_proved_yet_is_proved_before_it_is_written_down(rig: ChainRig) -> None:
    rig.put(2, KEYS[:1])
    ticket = load(rig, KEYS[:1])
    rig.store(KEYS[1:2])
    rig.chain.poll()
    assert {t.keys[0]: t.prove for t in rig.mover.stores()} == {KEYS[0]: True, KEYS[1]: False}
    for transfer in rig.mover.stores():
        rig.mover.run(transfer, {KEYS[0]: CORRUPT})
    rig.chain.poll()
    assert corrupt(rig) == [0, 0, 1], "host memory holds what it was given"
    assert [rig.resident(tier, KEYS[:1]) for tier in range(3)] == [[], [], []]
    rig.chain.end_load(ticket, {KEYS[0]: CORRUPT})
    rig.assert_quiet()


def test_what_its_reader_or_the_mover_has_proved_is_not_proved_again(rig: ChainRig) -> None:
    rig.put(2, KEYS[:2])
    rig.chain.end_load(load(rig, KEYS[:1]), proved=KEYS[:1])
    ticket = load(rig, KEYS[1:2])
    rig.settle()
    rig.tiers[1].forget(KEYS[:2])
    rig.chain.end_load(ticket, {KEYS[1]: CORRUPT})
    assert corrupt(rig) == [1, 0, 0], "as the mover proved it when it was written down"
    transfer, _ = rig.chain._ledger.carry(0, 1, KEYS[:1], FAR)
    assert transfer is not None
    assert not rig.chain._ledger.deferred_verification.any_of(KEYS[:2])


def test_what_outlived_an_earlier_process_is_proved_before_it_is_written_down(
    rig: ChainRig,
) -> None:
    rig.put(0, KEYS[:2])
    rig.restart()
    rig.chain.poll()
    assert [transfer.prove for transfer in rig.mover.stores()] == [True]


def test_nothing_is_remembered_of_what_host_memory_holds_no_more(rig: ChainRig) -> None:
    deferred_verification = rig.chain._ledger.deferred_verification
    rig.put(2, KEYS[:12])
    for at in range(0, 12, 4):
        rig.chain.end_load(load(rig, KEYS[at : at + 4]))
        rig.settle()
        assert not deferred_verification.any_of(KEYS[:at])
    rig.tiers[1].forget(KEYS[:12])
    rig.chain.end_load(load(rig, KEYS[:4]))
    rig.chain.forget(KEYS[:1])
    assert not deferred_verification.any_of(KEYS[:1])
    load(rig, KEYS[4:8], land=False)
    rig.chain.clear()
    assert not deferred_verification.any_of(KEYS)
