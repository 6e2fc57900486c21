"""The `Tier` half of what every tier promises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.errors import MediumError, NotResident
from kvtier.testing.contract_parts.pins import PinContract
from kvtier.testing.records import NAMESPACE, make_keys
from kvtier.testing.subject import Rig, Subject, failures
from kvtier.types import EventKind, Outcome, Presence, block_key

BLOCKS = 8


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
