"""What a tier promises of blocks that are pinned, forgotten or cleared."""

from __future__ import annotations

import pytest

from kvtier.errors import NotResident
from kvtier.testing.records import make_keys
from kvtier.testing.subject import Rig, Subject
from kvtier.types import Outcome, Presence

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
