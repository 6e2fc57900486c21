"""What every tier promises, sentence by sentence: subclass `TierContract` with your subject.

class TestMine(TierContract):
    subject = MySubject()
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.errors import MediumError, NotResident
from kvtier.testing.contract_medium import InspectionContract, MediumContract, TransferContract
from kvtier.testing.subject import GROUPED, NAMESPACE, Rig, Subject, failures, make_keys
from kvtier.types import BlockKey, EventKind, Outcome, Presence, block_key

BLOCKS = 8
STILL_OR_NO_LONGER_THERE = {Outcome.OK, Outcome.GONE}
"""A block that is dropped while somebody reads it: its room is not used again before the last pin
is gone, so that its own bytes arrive or none."""


class PinContract:
    """Pinned blocks stay in place until the last unpin, whatever is dropped meanwhile."""

    subject: Subject

    # pins

    def test_unknown_keys_cannot_be_loaded_and_pin_nothing(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        with pytest.raises(NotResident):
            rig.tier.prepare_load([*keys, *make_keys(1, start=99)])
        assert rig.tier.stats().pinned == 0
        new = make_keys(BLOCKS, start=100)
        assert rig.put(new) == new

    def test_what_is_pinned_is_never_evicted(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        pinned = keys[:3]
        spec = rig.tier.prepare_load(pinned)
        for start in range(100, 200, 10):
            taken = rig.put(make_keys(10, start=start))
            assert len(taken) == BLOCKS - len(pinned)
        assert rig.resident(pinned) == pinned
        assert not set(rig.tier.victims(100)) & set(pinned)
        assert all(outcome.ok for outcome in rig.read(pinned, spec).values())
        rig.tier.complete_load(pinned)
        new = make_keys(BLOCKS, start=500)
        assert rig.put(new) == new

    def test_pins_are_counted(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        rig.tier.prepare_load(keys)
        rig.tier.prepare_load([keys[0], keys[0]])
        rig.tier.complete_load(keys)
        assert sorted(rig.tier.victims(100)) == sorted(keys[1:])
        rig.tier.complete_load([keys[0]])
        assert keys[0] not in rig.tier.victims(100)
        rig.tier.complete_load([keys[0]])
        assert keys[0] in rig.tier.victims(100)
        rig.tier.prepare_load([keys[0], keys[0]])
        rig.tier.complete_load([keys[0], keys[0]])
        assert keys[0] in rig.tier.victims(100)

    def test_a_failed_load_is_offered_no_more(self, rig: Rig) -> None:
        keys = rig.put(make_keys(5))
        rig.tier.prepare_load(keys)
        bad = {
            keys[0]: Outcome.CORRUPT,
            keys[1]: Outcome.GONE,
            keys[2]: Outcome.IO_ERROR,
        }
        rig.tier.complete_load(keys, bad)
        assert rig.tier.lookup(keys) == [Presence.MISS] * 3 + [Presence.HIT] * 2
        assert rig.tier.stats().corrupt == 1
        rig.settle()
        assert rig.put(keys) == keys[:3]
        assert rig.get(keys) == keys

    def test_a_failed_load_ends_an_offer_while_another_one_reads(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        spec = rig.tier.prepare_load(keys[:1])
        rig.tier.prepare_load(keys[:1])
        rig.tier.complete_load(keys[:1], {keys[0]: Outcome.IO_ERROR})
        assert rig.tier.lookup(keys[:1]) == [Presence.MISS]
        rig.put(make_keys(BLOCKS, start=100))
        assert rig.read(keys[:1], spec)[keys[0]] in STILL_OR_NO_LONGER_THERE
        rig.tier.complete_load(keys[:1])
        rig.settle()
        new = make_keys(BLOCKS, start=200)
        assert rig.put(new) == new

    # forget and clear

    def test_forget_drops_what_is_resident(self, rig: Rig) -> None:
        keys = rig.put(make_keys(5))
        rig.tier.forget([*keys[:2], keys[0], *make_keys(2, start=77)])
        assert rig.resident(keys) == keys[2:]
        rig.settle()
        assert rig.put(keys[:2], evict=False) == keys[:2]

    def test_forget_waits_for_pins(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        spec = rig.tier.prepare_load(keys[:2])
        rig.tier.forget(keys[:1])
        rig.put(make_keys(BLOCKS, start=100))
        outcomes = rig.read(keys[:2], spec)
        assert outcomes[keys[0]] in STILL_OR_NO_LONGER_THERE
        assert outcomes[keys[1]] is Outcome.OK
        rig.tier.complete_load(keys[:2])
        assert rig.tier.lookup(keys[:2]) == [Presence.MISS, Presence.HIT]

    def test_what_was_forgotten_while_it_is_read_may_be_offered_again(self, rig: Rig) -> None:
        keys = rig.put(make_keys(2))
        rig.tier.prepare_load(keys[:1])
        rig.tier.forget(keys[:1])
        rig.put(keys[:1])
        rig.tier.complete_load(keys[:1])
        assert rig.tier.stats().pinned == 0
        rig.settle()
        rig.put(keys[:1])
        assert rig.get(keys) == keys
        assert len(rig.tier.victims(100)) == 2

    def test_clear_drops_what_is_resident_and_frees_pinned_room_later(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        spec = rig.tier.prepare_load(keys[:2])
        rig.tier.clear()
        assert rig.resident(keys) == []
        assert rig.tier.victims(100) == []
        rig.settle()
        new = make_keys(BLOCKS, start=100)
        taken = rig.fill(new)
        assert len(taken) >= BLOCKS - 2
        assert set(rig.read(keys[:2], spec).values()) <= STILL_OR_NO_LONGER_THERE
        rig.tier.complete_load(keys[:2])
        rig.settle()
        assert sorted(taken + rig.fill(new)) == sorted(new)
        assert rig.get(new) == new

    def test_clear_aborts_what_is_on_its_way(self, rig: Rig) -> None:
        keys = make_keys(3)
        reserved = rig.reserve(keys)
        rig.tier.clear()
        rig.write(reserved)
        rig.tier.complete_store(keys)
        assert rig.tier.lookup(keys) == [Presence.MISS] * 3
        assert rig.tier.take_events() == []
        rig.settle()
        assert rig.tier.stats().bytes_used == 0
        assert rig.put(keys) == keys
        assert rig.get(keys) == keys


# The `Tier` half of what every tier promises.


class CatalogueContract(PinContract):
    """The `Tier` half: what is known, reserved, committed, evicted and pinned."""

    subject: Subject

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        rig = Rig(self.subject, tmp_path, blocks=BLOCKS)
        yield rig
        rig.close()

    # opening

    def test_a_medium_that_cannot_be_used_is_refused_by_name(self, tmp_path: Path) -> None:
        place = tmp_path / "no folder"
        place.touch()
        with suppress(MediumError):  # else it needs no files
            Rig(self.subject, place, blocks=BLOCKS).close()

    def test_a_second_engine_is_refused_or_does_no_harm(self, rig: Rig) -> None:
        if self.subject.shared:
            return
        keys = rig.put(make_keys(BLOCKS))
        try:
            peer = rig.peer()
        except MediumError:
            return
        peer.put(make_keys(BLOCKS, start=100))
        assert rig.get(keys) == keys
        peer.close()

    # lookup, reserve, commit, abort

    def test_an_empty_tier_knows_nothing(self, rig: Rig) -> None:
        assert rig.tier.lookup(make_keys(3)) == [Presence.MISS] * 3
        assert rig.tier.victims(5) == []
        assert rig.tier.take_events() == []
        stats = rig.tier.stats()
        assert (stats.blocks, stats.bytes_used, stats.pinned, stats.in_flight) == (0, 0, 0, 0)

    def test_empty_lists_are_no_mistake(self, rig: Rig) -> None:
        assert rig.tier.lookup([]) == []
        assert len(rig.tier.prepare_load([])) == 0
        assert rig.reserve([]).keys == []
        rig.tier.complete_load([])
        rig.tier.complete_store([])
        rig.tier.touch([])
        rig.tier.forget([])
        assert rig.tier.victims(0) == []
        assert rig.handler.load(rig.tier.prepare_load([]), [], []) == []
        assert rig.handler.store(rig.reserve([]).spec, [], []) == []

    def test_only_a_commit_makes_a_hit(self, rig: Rig) -> None:
        keys = make_keys(3)
        reservation = rig.reserve(keys)
        assert reservation.keys == keys
        assert rig.tier.lookup(keys) == [Presence.PENDING] * 3
        rig.write(reservation)
        assert rig.tier.lookup(keys) == [Presence.PENDING] * 3
        rig.tier.complete_store(keys)
        assert rig.tier.lookup(keys) == [Presence.HIT] * 3
        assert rig.get(keys) == keys

    def test_a_reserved_key_cannot_be_loaded_or_evicted_or_forgotten(self, rig: Rig) -> None:
        keys = make_keys(BLOCKS)
        reservation = rig.reserve(keys)
        with pytest.raises(NotResident):
            rig.tier.prepare_load(keys[:1])
        assert rig.tier.victims(BLOCKS) == []
        rig.tier.forget(keys)
        assert rig.reserve(make_keys(3, start=100)).keys == []
        assert rig.tier.lookup(keys) == [Presence.PENDING] * BLOCKS
        rig.write(reservation)
        rig.tier.complete_store(keys)
        assert rig.get(keys) == keys

    def test_an_abort_leaves_no_trace(self, rig: Rig) -> None:
        keys = make_keys(BLOCKS)
        rig.write(rig.reserve(keys))
        rig.tier.complete_store(keys, failures(keys, Outcome.IO_ERROR))
        rig.settle()
        assert rig.tier.lookup(keys) == [Presence.MISS] * BLOCKS
        assert rig.tier.take_events() == []
        assert rig.tier.victims(BLOCKS) == []
        assert rig.tier.stats().bytes_used == 0
        others = make_keys(BLOCKS, start=50)
        assert rig.put(others, evict=False) == others

    def test_some_of_a_reservation_can_fail(self, rig: Rig) -> None:
        keys = make_keys(6)
        rig.write(rig.reserve(keys))
        rig.tier.complete_store(keys, failures(keys[1::2], Outcome.TIMEOUT))
        assert rig.resident(keys) == keys[0::2]
        rig.settle()
        assert rig.put(keys) == keys[1::2]
        assert rig.get(keys) == keys

    def test_a_reservation_can_be_completed_piece_by_piece(self, rig: Rig) -> None:
        keys = make_keys(4)
        rig.write(rig.reserve(keys))
        rig.tier.complete_store(keys[2:])
        assert rig.tier.lookup(keys) == [Presence.PENDING] * 2 + [Presence.HIT] * 2
        rig.tier.complete_store(keys[:2])
        assert rig.get(keys) == keys

    def test_a_reservation_keeps_the_order_and_skips_what_is_here(self, rig: Rig) -> None:
        keys = make_keys(7)
        rig.put([keys[3]])
        pending = rig.reserve([keys[1]])
        assert rig.reserve(keys[::-1]).keys == [keys[6], keys[5], keys[4], keys[2], keys[0]]
        rig.tier.complete_store(pending.keys, failures(pending.keys, Outcome.CANCELLED))

    def test_a_key_offered_twice_is_taken_once(self, rig: Rig) -> None:
        first, second = make_keys(2)
        reservation = rig.reserve([first, second, first, first])
        assert reservation.keys == [first, second]
        rig.write(reservation)
        rig.tier.complete_store(reservation.keys)
        assert rig.get([first, second]) == [first, second]

    def test_completing_what_was_never_reserved_shows_nothing(self, rig: Rig) -> None:
        keys = make_keys(2)
        rig.tier.complete_store(keys)
        rig.tier.complete_store(keys, failures(keys, Outcome.DROPPED))
        assert rig.tier.lookup(keys) == [Presence.MISS] * 2
        assert rig.tier.take_events() == []

    # room and eviction

    def test_a_full_tier_takes_nothing_without_eviction(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        assert len(keys) == BLOCKS
        assert rig.reserve(make_keys(2, start=100), evict=False).keys == []
        assert rig.resident(keys) == keys

    def test_eviction_makes_room_and_says_what_it_took(self, rig: Rig) -> None:
        old, new = make_keys(BLOCKS), make_keys(3, start=100)
        rig.put(old)
        rig.tier.take_events()
        victims = rig.tier.victims(3)
        reservation = rig.reserve(new)
        assert reservation.keys == new
        assert sorted(reservation.evicted) == sorted(victims)
        assert rig.tier.stats().evicted == 3
        assert rig.tier.lookup(reservation.evicted) == [Presence.MISS] * 3
        rig.write(reservation)
        rig.tier.complete_store(new)
        left = [key for key in old if key not in reservation.evicted]
        assert rig.get(left + new) == left + new
        removed = [e for e in rig.tier.take_events() if e.kind is EventKind.REMOVED]
        assert sorted(key for e in removed for key in e.keys) == sorted(reservation.evicted)

    def test_more_than_the_capacity_is_taken_in_part(self, rig: Rig) -> None:
        keys = make_keys(3 * BLOCKS)
        reservation = rig.reserve(keys)
        assert len(reservation.keys) == BLOCKS
        assert [key for key in keys if key in reservation.keys] == reservation.keys
        rig.check_room()

    def test_victims_are_resident_distinct_and_bounded(self, rig: Rig) -> None:
        keys = rig.put(make_keys(6))
        rig.tier.prepare_load(keys[:2])
        victims = rig.tier.victims(100)
        assert sorted(victims) == sorted(keys[2:])
        assert rig.tier.victims(3) == victims[:3]
        assert rig.tier.victims_within(3, 10.0, 1.0) == victims[:3]
        sure = rig.tier.victims_within(100, 10.0, 0.0)
        assert sure == victims[: len(sure)]
        assert rig.resident(keys) == keys
        rig.tier.complete_load(keys[:2])

    def test_what_is_retained_goes_last_and_what_is_released_first(self, rig: Rig) -> None:
        keys = rig.put(make_keys(6))
        rig.tier.retain_at_most(2)
        if rig.tier.retain(keys[:2], "session", math.inf):
            return  # it does not retain, and says so
        assert sorted(rig.tier.victims(4)) == sorted(keys[2:])
        assert rig.tier.retain(keys[2:3], "session", math.inf) == 1
        rig.tier.release("session")
        assert rig.tier.victims(2) == [keys[1], keys[0]]
        assert rig.tier.retain(keys[:4], "another", math.inf) == 2
        rig.tier.release("session", keys[3:5])
        assert rig.tier.victims(1) == [keys[4]], "the other session would retain keys[3]"
        rig.tier.release("another")
        assert rig.tier.retain(keys[:1], "session", math.inf) == 0
        rig.tier.clear()
        assert rig.tier.retained_for("session") == []
        assert rig.tier.stats().retained == 0

    def test_touch_changes_no_catalogue(self, rig: Rig) -> None:
        keys = rig.put(make_keys(3))
        rig.tier.take_events()
        rig.tier.touch([*make_keys(3, start=9), *keys], start=4)
        rig.tier.touch([keys[0], keys[0]])
        rig.tier.carry_uses({keys[0]: (2, 1.0), make_keys(1, start=9)[0]: (1 << 40, 1e12)})
        assert rig.resident(make_keys(20)) == keys
        assert rig.tier.take_events() == []

    # events, stats, keys

    def test_events_name_the_medium_and_come_once(self, rig: Rig) -> None:
        keys = rig.put(make_keys(3))
        stored = rig.tier.take_events()
        assert {(e.kind, e.medium) for e in stored} == {(EventKind.STORED, rig.tier.medium)}
        assert sorted(key for e in stored for key in e.keys) == sorted(keys)
        assert rig.tier.take_events() == []
        rig.tier.forget(keys[:1])
        removed = rig.tier.take_events()
        assert [(e.kind, e.keys) for e in removed] == [(EventKind.REMOVED, (keys[0],))]

    def test_stats_count(self, rig: Rig) -> None:
        keys = rig.put(make_keys(4))
        rig.tier.prepare_load(keys[:3])
        reserved = rig.reserve(make_keys(1, start=90))
        stats = rig.tier.stats()
        assert stats.medium == rig.tier.medium
        assert (stats.blocks, stats.stored) == (4, 4)
        assert (stats.pinned, stats.in_flight) == (3, 1)
        assert stats.bytes_used >= 4 * NAMESPACE.payload_bytes
        rig.check_room()
        rig.tier.complete_load(keys[:3])
        rig.tier.complete_store(reserved.keys, failures(reserved.keys, Outcome.DROPPED))
        assert (rig.tier.stats().pinned, rig.tier.stats().in_flight) == (0, 0)
        assert (stats.pinned, stats.in_flight) == (3, 1), "they are of their moment"

    def test_what_is_free_takes_nobodys_place(self, rig: Rig) -> None:
        rig.put(make_keys(BLOCKS - 2))
        taken = rig.reserve(make_keys(min(rig.tier.stats().free, BLOCKS), start=50))
        assert taken.evicted == []
        rig.tier.complete_store(taken.keys, failures(taken.keys, Outcome.DROPPED))

    @pytest.mark.parametrize("size", [1, 4, 20, 32, 36])
    def test_keys_of_every_length(self, rig: Rig, size: int) -> None:
        hashes = [b"\x00" * size, b"\xff" * size, b"\x00" * (size - 1) + b"\x01", b"\x80" * size]
        keys = [block_key(one, group) for one in hashes for group in (0, 1)]
        assert rig.put(keys) == keys
        assert rig.get(keys) == keys
        rig.tier.tick()
        assert rig.resident(keys) == keys


# What happens to blocks over time: restarts of an engine, and other engines beside it.


class RestartContract:
    """What outlives a process, and what engines see of each other."""

    subject: Subject

    def test_a_restart_serves_what_was_committed_and_nothing_else(self, rig: Rig) -> None:
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(4))
        landed = make_keys(2, start=50)
        rig.write(rig.reserve(landed))
        rig.reserve(make_keys(1, start=60))  # of which not one byte arrives
        aborted = rig.reserve(make_keys(1, start=70)).keys
        rig.tier.complete_store(aborted, failures(aborted, Outcome.IO_ERROR))
        rig.tier.forget(keys[3:])
        rig.reopen()
        here = keys[:3] + (landed if self.subject.revives else [])
        assert rig.resident(make_keys(100)) == here
        assert rig.get(here) == here
        assert rig.tier.stats().blocks == len(here)
        rig.check_room()
        rig.tier.forget(landed)
        rig.settle()
        new = make_keys(BLOCKS - 3, start=49)  # among them what was reserved then
        assert rig.put(new, evict=False) == new
        assert rig.put(make_keys(1, start=300), evict=False) == []
        assert rig.get(keys + new) == keys[:3] + new

    def test_what_outlived_a_process_is_told_once_if_at_all(self, rig: Rig) -> None:
        keys = rig.put(make_keys(4))
        rig.tier.forget(keys[3:])
        rig.tier.flush()
        rig.reopen()
        told: list[BlockKey] = []
        while left := rig.tier.recovered:
            some, uses = rig.tier.take_recovered(2)
            assert len(some) == len(uses) <= 2
            assert rig.tier.recovered < left, "it would be asked for ever"
            told += some
        assert sorted(told) in ([], sorted(keys[:3]))
        hottest: list[BlockKey] = []
        while some := rig.tier.take_hottest(2):
            assert len(some) <= 2
            hottest += some
        assert hottest in ([], told), "both are told in one order"
        rig.tier.forget_hottest()
        assert list(rig.tier.take_hottest(1)) == []

    def test_what_was_dropped_while_it_was_read_stays_dropped(self, rig: Rig) -> None:
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(4))
        rig.tier.prepare_load(keys)
        rig.tier.forget(keys[:1])
        rig.tier.prepare_load(keys[1:2])
        rig.tier.complete_load(keys[1:2], failures(keys[1:2], Outcome.IO_ERROR))
        rig.tier.flush()
        rig.reopen()  # with pins, which go with the process that held them
        assert rig.get(keys) == keys[2:]

    def test_what_was_cleared_stays_away(self, rig: Rig) -> None:
        if not self.subject.persistent:
            return
        keys = rig.put(make_keys(4))
        rig.tier.prepare_load(keys[:1])
        landed = rig.reserve(make_keys(2, start=50))
        rig.write(landed)
        rig.tier.clear()
        rig.tier.flush()
        rig.reopen()
        may_revive = landed.keys if self.subject.revives else []
        assert set(rig.resident(make_keys(100))) <= set(may_revive)

    def test_a_smaller_capacity_holds_after_a_restart(self, rig: Rig) -> None:
        keys = rig.put(make_keys(BLOCKS))
        rig.close()
        smaller = Rig(self.subject, rig.folder, blocks=3)
        smaller.settle()
        for _ in range(10):
            assert smaller.get(keys) == smaller.resident(keys)
            smaller.check_room()
            assert len(smaller.put(make_keys(5, start=100))) <= 3
            smaller.tier.tick()
        smaller.close()
        rig.open()

    def test_another_namespace_sees_nothing(self, rig: Rig) -> None:
        keys = rig.put(make_keys(3))
        rig.close()
        other = Rig(self.subject, rig.folder, blocks=BLOCKS, namespace=GROUPED)
        assert other.resident(keys) == []
        assert other.get(keys) == []
        other.close()
        rig.open()  # the other one may have needed the room
        assert rig.get(keys) == rig.resident(keys)

    def test_engines_find_what_others_commit(self, rig: Rig) -> None:
        if not self.subject.shared:
            return
        peer = rig.peer()
        keys = rig.put(make_keys(3))
        for one in (rig, peer):  # which may have to hear from the first how much room it has
            one.tier.refresh()
        assert peer.get(keys) == keys
        # Few: where there is room for none, others may be made to drop some.
        more = peer.put(make_keys(2, start=50))
        rig.tier.refresh()
        assert rig.get(more) == more
        assert rig.put(more) == []
        peer.close()
        rig.tier.refresh()
        assert rig.get(keys + more) == keys + more

    def test_engines_stop_finding_what_others_drop(self, rig: Rig) -> None:
        if not self.subject.shared:
            return
        peer = rig.peer()
        keys = rig.put(make_keys(5))
        peer.tier.refresh()
        rig.tier.forget(keys[:2])
        rig.tier.flush()
        peer.tier.refresh()
        assert peer.get(keys) == keys[2:]
        peer.close()

    def test_engines_share_one_budget(self, rig: Rig) -> None:
        if not self.subject.shared:
            return
        peer = rig.peer()
        for start in range(0, 10 * BLOCKS, BLOCKS):
            for one in (rig, peer):
                one.put(make_keys(BLOCKS, start=start))
                one.tier.tick()
            rig.check_room()
        peer.close()


class TierContract(
    CatalogueContract, TransferContract, MediumContract, RestartContract, InspectionContract
):
    """All that a backend must do, and what its subject says that it does beyond."""
