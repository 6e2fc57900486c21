"""The ledger alone: whatever happens to what it holds, in the end it holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers.chains import KEYS, ChainRig, is_quiet

from kvtier.chain.ledger import Ledger, Move, SettledMove, Ticket, split
from kvtier.errors import NotResident
from kvtier.testing.subject import make_keys
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, Presence

FAR = 1e9
OUTCOMES = list(Outcome)


def settle(ledger: Ledger, move: Move, outcomes: list[Outcome] | None = None) -> SettledMove | None:
    return ledger.settle(move.transfer.id, outcomes or [Outcome.OK] * len(move.keys))


@pytest.fixture
def rig() -> ChainRig:
    return ChainRig([4, 8])


@pytest.fixture
def ledger(rig: ChainRig) -> Ledger:
    return Ledger(rig.tiers)


def test_a_move_pins_its_source_and_reserves_its_target(rig: ChainRig, ledger: Ledger) -> None:
    keys = rig.put(0, KEYS[:3])
    move, absent = ledger.carry(0, 1, [*keys, KEYS[9]], FAR)
    assert move is not None
    assert (move.keys, absent) == (keys, [KEYS[9]])
    assert rig.tiers[0].stats().pinned == 3
    assert rig.tiers[1].lookup(keys) == [Presence.PENDING] * 3
    settled = settle(ledger, move, [Outcome.OK, Outcome.NO_SPACE, Outcome.OK])
    assert settled is not None
    assert settled.committed == [keys[0], keys[2]]
    assert settled.failed == {keys[1]: Outcome.NO_SPACE}
    assert settled.blamed == {}
    assert rig.resident(1, keys) == [keys[0], keys[2]]
    assert rig.resident(0, keys) == keys
    assert is_quiet(ledger)
    rig.assert_quiet()


def test_a_move_takes_only_what_is_new_to_its_target(rig: ChainRig, ledger: Ledger) -> None:
    keys = rig.put(0, KEYS[:4])
    rig.put(1, [keys[0], keys[2]])
    move, absent = ledger.carry(0, 1, keys, FAR)
    assert move is not None
    assert (move.keys, absent) == ([keys[1], keys[3]], [])
    assert rig.tiers[0].stats().pinned == 2
    store = rig.tiers[0].store
    assert [store.owners[slot] for slot in move.transfer.source_spec.slots] == move.keys  # type: ignore[attr-defined]
    assert ledger.carry(0, 1, keys, FAR) == (None, [])
    ledger.refuse(move)
    assert rig.resident(1, keys) == [keys[0], keys[2]]
    assert is_quiet(ledger)
    rig.assert_quiet()


def test_a_result_is_settled_once_and_unknown_ones_are_not(rig: ChainRig, ledger: Ledger) -> None:
    rig.put(0, KEYS[:1])
    move, _ = ledger.carry(0, 1, KEYS[:1], FAR)
    assert move is not None
    assert settle(ledger, move) is not None
    assert settle(ledger, move) is None


def test_a_result_with_too_few_outcomes_commits_no_more_than_it_proves(
    rig: ChainRig, ledger: Ledger
) -> None:
    keys = rig.put(1, KEYS[:3])
    ticket = ledger.open_ticket("a", FAR)
    move = ledger.promote(ticket, 1, keys, FAR)
    assert move is not None
    ledger.seal(ticket, keys)
    settled = settle(ledger, move, [Outcome.OK])
    assert settled is not None
    assert settled.committed == keys[:1]
    assert ticket.failed == dict.fromkeys(keys[1:], Outcome.DROPPED)
    assert rig.resident(0, keys) == keys[:1]
    ledger.release(ticket)
    rig.assert_quiet()


def test_no_slot_is_released_on_a_clock(rig: ChainRig, ledger: Ledger) -> None:
    keys = rig.put(1, KEYS[:4])
    ticket = ledger.open_ticket("a", 10.0)
    move = ledger.promote(ticket, 1, keys, 10.0)
    assert move is not None
    ledger.seal(ticket, keys)
    assert ledger.expire(9.0) == ([], [])
    assert ledger.expire(10.0) == ([ticket], [move.transfer.id])
    assert ledger.expire(1000.0) == ([], []), "told once"
    ledger.release(ticket)
    assert ledger.moving
    assert not is_quiet(ledger)
    assert rig.tiers[0].prepare_store(KEYS[10:14]).keys == [], "the mover may still write there"
    settle(ledger, move)
    assert is_quiet(ledger)
    rig.assert_quiet()


def test_pins_are_not_released_on_a_clock_either(rig: ChainRig, ledger: Ledger) -> None:
    keys = rig.put(0, KEYS[:2])
    ticket = ledger.open_ticket("a", 10.0)
    assert ledger.pin(ticket, keys)
    ledger.seal(ticket, keys)
    assert ledger.expire(1000.0) == ([], [])
    assert rig.tiers[0].stats().pinned == 2
    ledger.release(ticket)
    rig.assert_quiet()


def test_what_goes_between_each_question_and_the_pin_is_a_miss_and_no_error(
    rig: ChainRig, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take its slabs away at any moment."""
    keys = rig.put(1, KEYS[:2])
    prepare_load = rig.tiers[1].prepare_load

    def always_too_late(keys: Sequence[BlockKey]) -> LoadStoreSpec:
        if keys:
            raise NotResident("it has just gone")
        return prepare_load(keys)

    monkeypatch.setattr(rig.tiers[1], "prepare_load", always_too_late)
    ticket = ledger.open_ticket("a", FAR)
    assert ledger.promote(ticket, 1, keys, FAR) is None
    ledger.seal(ticket, keys)
    assert ticket.missing == keys
    ledger.release(ticket)
    assert is_quiet(ledger)
    rig.assert_quiet()


class Compared(bytes):
    """A key that counts how often it was compared with another one."""

    times = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += self is not other
        return bytes.__eq__(self, other)


def test_a_large_load_that_fails_is_no_work_for_its_square() -> None:
    """A mover that dies has thousands of blocks under way, and requests wait for this thread."""
    keys = [BlockKey(Compared(key)) for key in make_keys(500)]
    rig = ChainRig([500, 500])
    ledger = Ledger(rig.tiers)
    rig.put(1, keys)
    ticket = ledger.open_ticket("a", FAR)
    move = ledger.promote(ticket, 1, keys, FAR)
    assert move is not None
    ledger.seal(ticket, keys)
    Compared.times = 0
    settle(ledger, move, [Outcome.DROPPED] * 500)
    ledger.release(ticket)
    assert Compared.times < 2 * 500
    assert is_quiet(ledger)
    rig.assert_quiet()


def test_a_store_that_was_voided_is_not_committed(rig: ChainRig, ledger: Ledger) -> None:
    taken = ledger.reserve(KEYS[:2])
    ledger.void_all()
    assert ledger.commit(taken.keys) == []
    assert ledger.commit(taken.keys) == [], "and was reserved once only"
    assert rig.resident(0, KEYS[:2]) == []
    assert is_quiet(ledger)


@given(st.lists(st.sampled_from(KEYS[:3])), st.lists(st.sampled_from(KEYS[:3])))
def test_pins_are_split_by_count(keys: list[BlockKey], others: list[BlockKey]) -> None:
    among = {key: others.count(key) for key in others}
    mine, rest = split(keys, among)
    assert sorted(mine + rest) == sorted(keys)
    for key in KEYS[:3]:
        assert mine.count(key) == min(keys.count(key), others.count(key))


class Juggler:
    """Does anything at all to a ledger, as a seed says."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rig = ChainRig([5, 7, 9])
        self.ledger = Ledger(self.rig.tiers)
        self.universe = make_keys(8)
        self.tickets: list[Ticket] = []
        self.moves: list[Move] = []
        self.stores: list[list[BlockKey]] = []
        self.now = 0.0
        for tier in range(3):
            self.rig.put(tier, self.some())

    def some(self) -> list[BlockKey]:
        return self.random.sample(self.universe, self.random.randint(1, 6))

    def open(self) -> None:
        ledger, keys = self.ledger, self.some()
        ticket = ledger.open_ticket(self.random.choice("ab"), self.now + self.random.random() * 4)
        ledger.pin(ticket, self.rig.resident(0, keys))
        ledger.join(ticket, [key for key in keys if key in ledger.joinable])
        for source in (1, 2):
            left = [key for key in self.rig.resident(source, keys) if key not in ticket.pending]
            left = [key for key in left if key not in ticket.pinned]
            move = ledger.promote(ticket, source, left, self.now + 3.0) if left else None
            if move is not None and self.random.random() < 0.2:
                ledger.refuse(move)
            elif move is not None:
                self.moves.append(move)
        ledger.seal(ticket, keys)
        assert len(ticket.spec) == len(ticket.keys)
        self.tickets.append(ticket)

    def carry(self) -> None:
        source, target = self.random.choice([(0, 1), (0, 2), (1, 2)])
        move, _ = self.ledger.carry(source, target, self.some(), self.now + 3)
        if move is not None:
            self.moves.append(move)

    def settle(self) -> None:
        if self.moves:
            move = self.moves.pop(self.random.randrange(len(self.moves)))
            bad = self.random.random() < 0.5
            outcomes = [self.random.choice(OUTCOMES) if bad else Outcome.OK for _ in move.keys]
            assert settle(self.ledger, move, outcomes) is not None

    def release(self) -> None:
        if self.tickets:
            ticket = self.tickets.pop(self.random.randrange(len(self.tickets)))
            failed = {key: self.random.choice(OUTCOMES[1:]) for key in self.some()}
            self.ledger.release(ticket, failed if self.random.random() < 0.3 else None)

    def cancel(self) -> None:
        request = self.random.choice("ab")
        for ticket in [ticket for ticket in self.tickets if ticket.request == request]:
            self.ledger.release(ticket)
            self.tickets.remove(ticket)
        self.ledger.abandon([move.transfer.id for move in self.moves if not move.waiters])

    def store(self) -> None:
        self.stores.append(self.ledger.reserve(self.some()).keys)

    def commit(self) -> None:
        if self.stores:
            keys = self.stores.pop(self.random.randrange(len(self.stores)))
            failed = {key: Outcome.IO_ERROR for key in keys if self.random.random() < 0.3}
            committed = self.ledger.commit(keys, failed)
            assert self.rig.resident(0, committed) == committed

    def pass_time(self) -> None:
        self.now += self.random.random() * 2
        for ticket in self.ledger.expire(self.now)[0]:
            assert ticket.landed

    def void(self) -> None:
        if self.random.random() < 0.5:
            self.ledger.void(self.some())
        else:
            self.ledger.void_all()

    def check(self) -> None:
        """What the ledger holds is what the tiers hold, no more and no less."""
        for index, tier in enumerate(self.rig.tiers):
            pinned = set(self.ledger.pinned(index))
            assert tier.stats().pinned == len(pinned)
            transfers = [move.transfer for move in self.moves]
            loads = [t for t in transfers if (t.source, t.target) == (index, 0)]
            assert self.ledger.loading[index] == sum(len(t.keys) for t in loads)
            reserved = {k for t in transfers if t.target == index for k in t.keys}
            if index == 0:
                reserved |= {key for keys in self.stores for key in keys}
                held = {key for ticket in self.tickets for key in ticket.held}
                assert set(self.ledger.joinable) | self.ledger.abandoned == held | {
                    key for t in transfers if t.target == 0 for key in t.keys
                }
                reserved |= held
                assert not self.ledger.abandoned & self.ledger.joinable.keys()
            assert tier.stats().in_flight == len(reserved)


@settings(max_examples=200)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_nothing_leaks(seed: int) -> None:
    juggler = Juggler(seed)
    acts = [juggler.open, juggler.open, juggler.carry, juggler.settle, juggler.settle]
    acts += [juggler.release, juggler.cancel, juggler.store, juggler.commit]
    acts += [juggler.pass_time, juggler.void]
    for _ in range(60):
        juggler.random.choice(acts)()
        juggler.check()
    while juggler.moves:
        juggler.settle()
    while juggler.stores:
        juggler.commit()
    while juggler.tickets:
        juggler.release()
    assert is_quiet(juggler.ledger)
    assert not juggler.ledger.joinable
    assert not juggler.ledger.abandoned
    juggler.rig.assert_quiet()
