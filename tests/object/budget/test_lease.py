"""Who is the caretaker: by conditional puts, without them, and whatever clocks say."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import Clock, LastWins

from kvtier.backends.object import lease as lease_module
from kvtier.backends.object import writer_ids
from kvtier.backends.object.lease import CaretakerReport, Lease, LeaseLost, ServerPresence, Servers
from kvtier.backends.object.object_names import ServerName, term_name
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.backends.object.stores.file_store import FileStore

LEASE_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def elsewhere() -> str:
    """A server of another machine: nobody here knows whether it lives."""
    own = writer_ids.new_writer_id()
    return f"{int(own[:8], 16) ^ 1:08x}{own[8:]}"


def candidate(store: FileStore, clock: Clock) -> Lease:
    return Lease(store, elsewhere(), LEASE_S, clock)


def test_one_of_many_and_then_another(store: FileStore) -> None:
    """Their clocks say quite different things."""
    clocks = [Clock(1e9 * number) for number in range(3)]
    leases = [candidate(store, clock) for clock in clocks]
    assert [lease.look() for lease in leases] == [None] * 3
    assert [lease.acquire() for lease in leases] == [True, False, False]
    leases[0].publish(CaretakerReport(bytes=7, measured=True))
    for lease in leases[1:]:
        report = lease.look()
        assert report is not None
        assert report.bytes == 7
    for clock in clocks:
        clock.at += 1.4 * LEASE_S
    assert leases[1].look() is not None, "it may just be about to renew it"
    clocks[2].at += 0.2 * LEASE_S
    assert leases[2].look() is None
    assert leases[2].acquire()
    assert leases[2].last_report.bytes == 7
    with pytest.raises(LeaseLost):
        leases[0].confirm()
    with pytest.raises(LeaseLost):
        leases[0].publish(CaretakerReport())
    leases[0].look()
    assert not leases[0].held


def test_its_lease_is_over_for_itself_before_it_is_for_others(store: FileStore) -> None:
    clock = Clock()
    lease = candidate(store, clock)
    lease.look()
    assert lease.acquire()
    assert 0 < lease.confirm() < LEASE_S
    clock.at += 0.9 * LEASE_S
    with pytest.raises(LeaseLost):
        lease.confirm()
    assert lease.held, "it may still renew it"
    lease.publish(CaretakerReport())
    assert lease.confirm() > 0


def test_a_later_term_is_seen_before_anything_is_deleted(store: FileStore) -> None:
    lease = candidate(store, Clock())
    lease.look()
    assert lease.acquire()
    store.put(term_name(2), [memoryview(b"{}")])
    with pytest.raises(LeaseLost):
        lease.confirm()
    assert not lease.held


@pytest.mark.parametrize(
    "lost", [b"", b"another's", b'{"server": "\xb8"}', b'{"more": ' + b"[" * 100_000, None]
)
def test_a_lease_whose_object_is_not_as_it_was_written(
    store: FileStore, lost: bytes | None
) -> None:
    lease = candidate(store, Clock())
    lease.look()
    assert lease.acquire()
    if lost is None:
        store.delete([term_name(1)])
    else:
        store.put(term_name(1), [memoryview(lost)])
    with pytest.raises(LeaseLost):
        lease.confirm()


@pytest.mark.parametrize(("digit", "flipped"), [(b"7654321", b"7654320"), (b"30,", b"39,")])
def test_a_flipped_digit_is_no_other_report(store: FileStore, digit: bytes, flipped: bytes) -> None:
    holder, other = Lease(store, elsewhere(), 30, Clock()), candidate(store, Clock())
    holder.look()
    assert holder.acquire()
    holder.publish(CaretakerReport(bytes=7654321, measured=True))
    (body,) = (each.read_bytes() for each in (store.root / "caretaker").iterdir())
    assert digit in body
    store.put(term_name(1), [memoryview(body.replace(digit, flipped))])
    other.look()
    assert other.last_report.bytes == 0, "it cannot be read"
    holder.publish(CaretakerReport(bytes=7654322, measured=True))
    report = other.look()
    assert report is not None
    assert report.bytes == 7654322


def test_who_hears_no_answer_to_its_bid_does_not_wait_for_itself(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, put, answers = candidate(store, Clock()), store.put, [True, False]

    def cut(*args: Any, **more: Any) -> Any:
        done = put(*args, **more)
        if not answers.pop(0):
            raise Unavailable("the connection is cut")
        return done

    lease.look()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(store, "put", cut)
        with pytest.raises(Unavailable):
            lease.acquire()
    assert lease.look() is None
    assert lease.acquire()
    assert lease.term == 2
    assert lease.confirm() > 0


def test_without_conditional_puts_the_last_writer_wins(tmp_path: Path) -> None:
    """Nobody waits for it: whoever stands for election looks again when it is decided."""
    store, clock = LastWins(tmp_path / "store"), Clock()
    first, later = candidate(store, clock), candidate(store, clock)
    first.look()
    later.look()
    assert not first.acquire()
    assert not later.acquire()
    assert first.decided_at >= clock.at + lease_module._SETTLE_S
    assert first.look() is None
    assert not first.acquire(), "it is not decided yet"
    clock.at = later.decided_at
    assert first.look() is None
    assert not first.acquire()
    assert first.look() is not None, "another is the caretaker"
    assert later.look() is None
    assert later.acquire()
    assert later.confirm() > 0


def test_without_conditional_puts_a_lease_begins_when_it_is_decided(tmp_path: Path) -> None:
    """Else a short one would be over before it begins."""
    clock = Clock()
    lease = candidate(LastWins(tmp_path / "store"), clock)
    lease.look()
    assert not lease.acquire()
    clock.at += 2 * LEASE_S
    assert lease.acquire()
    assert lease.confirm() > 0
    lease.publish(CaretakerReport(measured=True))


def test_a_candidate_that_closes_or_fails_keeps_nobody_waiting(tmp_path: Path) -> None:
    store, clock = LastWins(tmp_path / "store"), Clock()
    first, second = candidate(store, clock), candidate(store, clock)
    first.look()
    assert not first.acquire()
    first.close()
    assert second.look() is None
    assert not second.acquire()
    clock.at = second.decided_at
    assert second.acquire()
    assert second.term == 2
    assert first.look() is not None
    assert first.decided_at == math.inf


def test_who_closes_makes_room_at_once_and_who_died_here_too(store: FileStore) -> None:
    first = candidate(store, Clock())
    first.look()
    assert first.acquire()
    first.close()
    dead = writer_ids.new_writer_id()
    second = Lease(store, dead, LEASE_S, Clock())
    assert second.look() is None
    assert second.acquire()
    third = candidate(store, Clock())
    assert third.look() is not None
    writer_ids.mark_ended(dead)
    assert third.look() is None
    assert third.acquire()


def test_servers_live_as_long_as_they_say_so(store: FileStore) -> None:
    clock, ours = Clock(), Clock(5e8)
    names = [ServerName("ab" * 16, elsewhere(), f"{number:016x}", 9, 3) for number in range(2)]
    presences = [ServerPresence(store, name, LEASE_S, clock) for name in names]
    servers = Servers(store, LEASE_S, ours)
    own = ServerName("ab" * 16, elsewhere(), "f" * 16, 9, 3)
    for presence in presences:
        presence.renew()
    assert servers.look(own) == ({name.writer: name for name in [own, *names]}, [])
    presences[1].renew(lacks_room=True)
    servers.look(own)
    assert servers.lacking_room == {names[1].writer}
    for at in range(1, 8):
        clock.at = 10.0 * at
        ours.at += 10.0
        presences[1].renew()
        # as if by a store whose clock goes: two renewals have different times
        for info in store.list("servers/"):
            if info.name == str(names[1]):
                os.utime(store.root / info.name, (at, at))
        living, dead = servers.look(own)
        assert names[1].writer in living
        assert (names[0].writer in living) == (10.0 * at <= 1.5 * LEASE_S)
        assert dead == ([names[0]] if at == 5 else [])
    assert presences[0].until < clock.at
    presences[1].close()
    assert list(store.list("servers/")) == []
