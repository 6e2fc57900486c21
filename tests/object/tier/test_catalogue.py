"""What a tier makes of what others write down: late, twice, under another name, or of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.object.manual_keepers import RECORD, blocks_in, created, look

from kvtier.backends.object.handler import ObjectSpec
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, REMOVED, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey, Presence

[KEY] = make_keys(1)


class Shared:
    """A tier, and a neighbour who shares its store."""

    def __init__(self, folder: Path) -> None:
        self.store = FileStore(folder / "store")
        self.keeper, self.tier = created(self.store)
        self.budget = self.keeper.budget
        self.keeper.open(self.tier.offered)
        self.tier.start()
        self.neighbour = Journal(self.store, NAMESPACE.id)
        self.now_us = int(time.time() * 1e6)

    def put(self, generation: int = 0) -> None:
        name = block_name(NAMESPACE.id, KEY, generation)
        self.store.put(name, [memoryview(bytes(RECORD))])

    def say(
        self,
        kind: int,
        at_us: int,
        generations: Sequence[int] = (0,),
        keys: Sequence[BlockKey] = (KEY,),
    ) -> None:
        """The neighbour writes this down, and the tier hears of it."""
        sizes, times = [RECORD] * len(keys), [self.now_us + at_us] * len(keys)
        self.neighbour.append(pack_entries(kind, keys, generations, sizes, times))
        self.keeper._publish(self.keeper._journal.read_new())
        self.tier.tick()

    def look(self) -> None:
        look(self.keeper, self.tier)

    @property
    def offered(self) -> bool:
        return self.tier.lookup([KEY]) == [Presence.HIT]


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_a_removal_that_is_heard_of_late_hides_nothing_stored_since(shared: Shared) -> None:
    shared.put()
    shared.say(ADDED, -1000)
    shared.say(REMOVED, -2000)
    assert shared.offered
    assert shared.budget.used == RECORD
    shared.say(REMOVED, -1000)
    assert not shared.offered, "of equal times the removal counts"
    assert shared.budget.used == 0


def test_an_object_that_is_stored_again_outlasts_the_removal_before_that(shared: Shared) -> None:
    shared.put()
    shared.say(ADDED, -3000)
    shared.say(ADDED, -1000)
    shared.say(ADDED, -4000)  # heard of late
    shared.say(REMOVED, -2000)
    assert shared.offered
    assert shared.budget.used == RECORD


def test_a_removal_is_one_of_this_object_and_no_other_of_its_key(shared: Shared) -> None:
    shared.put(3)
    shared.say(ADDED, -3000, [3])
    shared.say(REMOVED, -1000, [0])
    assert shared.offered
    shared.say(REMOVED, -1000, [3])
    assert not shared.offered
    shared.put(0)
    shared.say(ADDED, -500, [0])
    shared.say(REMOVED, -400, [3])
    assert shared.offered, "what was known of the former object is forgotten"
    assert shared.budget.used == RECORD


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
@pytest.mark.parametrize("at_once", [False, True])
def test_of_two_objects_of_one_block_the_later_is_offered_and_the_other_goes(
    shared: Shared, order: tuple[int, int], at_once: bool
) -> None:
    for generation in order:
        shared.put(generation)
        if not at_once:
            shared.say(ADDED, -1000, [generation])
    if at_once:
        shared.say(ADDED, -1000, order, keys=[KEY, KEY])
    assert list(shared.tier.offered()) == [(KEY, 2)]
    assert shared.budget.used == RECORD
    shared.keeper.refresh()
    shared.look()
    assert blocks_in(shared.store) == 1
    assert list(shared.tier.offered()) == [(KEY, 2)]
    assert shared.budget.used == RECORD


@pytest.mark.parametrize("read", [False, True])
def test_what_was_dropped_stays_so_and_what_comes_then_has_another_name(
    shared: Shared, read: bool
) -> None:
    shared.put()
    shared.say(ADDED, -2000)
    if read:
        shared.tier.prepare_load([KEY])
    shared.tier.forget([KEY])
    shared.say(ADDED, -1000)  # heard of late
    assert not shared.offered
    if read:
        assert shared.budget.used == RECORD, "until it is read"
        shared.tier.complete_load([KEY])
    assert shared.budget.used == 0
    reserved = shared.tier.prepare_store([KEY])
    assert isinstance(reserved.spec, ObjectSpec)
    assert reserved.spec.generations == [1], "no delete that is late hits it"
    shared.tier.complete_store([KEY])
    shared.put(1)
    shared.keeper.refresh()
    shared.look()
    assert list(shared.tier.offered()) == [(KEY, 1)]
    assert blocks_in(shared.store) == 1


def test_what_another_has_removed_is_stored_under_another_name(shared: Shared) -> None:
    shared.say(ADDED, -2000, [3])
    shared.say(REMOVED, -1000, [3])
    reserved = shared.tier.prepare_store([KEY])
    assert isinstance(reserved.spec, ObjectSpec)
    assert reserved.spec.generations == [4]


def test_what_is_being_stored_is_counted_once_though_another_has_stored_it(
    shared: Shared,
) -> None:
    assert shared.tier.prepare_store([KEY]).keys == [KEY]
    shared.put()
    shared.say(ADDED, 0)
    assert shared.budget.used == RECORD
    shared.tier.complete_store([KEY])
    assert shared.offered
    assert shared.budget.used == RECORD


def test_each_of_many_is_offered_by_its_own_name(shared: Shared) -> None:
    [other] = make_keys(1, start=1)
    shared.say(ADDED, -1000, [0, 3], keys=[KEY, other])
    assert dict(shared.tier.offered()) == {KEY: 0, other: 3}
    spec = shared.tier.prepare_load([KEY, other])
    assert isinstance(spec, ObjectSpec)
    assert spec.generations == [0, 3]


def test_room_for_more_blocks_is_made_a_little_at_a_time(shared: Shared) -> None:
    """Half as many again, of millions, kept a request waiting."""
    shared.tier._take_handles(100_000)
    known = len(shared.tier._key_of)
    shared.tier._take_handles(known - 100_000 + 1)
    assert 0 < len(shared.tier._key_of) - known < 20_000
