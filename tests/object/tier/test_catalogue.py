"""What a tier makes of what others write down: late, twice, under another name, or of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.object.manual_keepers import RECORD, blocks_in, created, look

from kvtier.backends.object.housekeeping.updates import Update
from kvtier.backends.object.manifests.block_rows import Rows
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, pack_entries
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.spec import ObjectSpec
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
        self.neighbour = Journal(self.store, NAMESPACE)
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
        size: int = RECORD,
    ) -> None:
        """The neighbour writes this down, and the tier hears of it."""
        sizes, times = [size] * len(keys), [self.now_us + at_us] * len(keys)
        self.neighbour.append(pack_entries(kind, keys, generations, sizes, times))
        self.keeper._publish(self.keeper._journal.read_new())
        self.tier.tick()

    def look(self) -> None:
        look(self.keeper, self.tier)

    def counted(self) -> tuple[int, int, int]:
        return self.budget.used, self.budget.uncatalogued, self.budget.deleting

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
    assert shared.counted() == (RECORD, 0, 0)
    shared.say(REMOVED, -1000)
    assert not shared.offered, "of equal times the removal counts"
    assert shared.counted() == (0, 0, 0)


def test_an_object_that_is_stored_again_outlasts_the_removal_before_that(shared: Shared) -> None:
    shared.put()
    shared.say(ADDED, -3000)
    shared.say(ADDED, -1000)
    shared.say(ADDED, -4000)  # heard of late
    shared.say(REMOVED, -2000)
    assert shared.offered
    assert shared.counted() == (RECORD, 0, 0)


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
    assert shared.counted() == (RECORD, 0, 0)


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_of_two_objects_of_one_key_the_later_is_offered_and_the_other_goes(
    shared: Shared, order: tuple[int, int]
) -> None:
    for generation in order:
        shared.put(generation)
    shared.say(ADDED, -1000, order, keys=[KEY, KEY])
    assert shared.offered
    assert shared.counted() == (RECORD, RECORD, 0)
    assert list(shared.tier.offered()) == [(KEY, 2)]
    shared.keeper.refresh()
    shared.tier.tick()
    assert shared.counted() == (RECORD, 0, RECORD), "the audit tells of it, and it is deleted"
    shared.look()
    assert shared.counted() == (RECORD, 0, 0)
    assert [info.name for info in shared.store.list(f"{NAMESPACE.id}/blocks")] == [
        block_name(NAMESPACE.id, KEY, 2)
    ]
    assert shared.offered


def test_a_second_object_of_a_key_is_deleted_and_counted_until_then(shared: Shared) -> None:
    for generation in (0, 2):
        shared.put(generation)
        shared.say(ADDED, -1000, [generation])
    assert shared.counted() == (RECORD, 0, RECORD)
    shared.say(ADDED, -900, [2])
    assert shared.counted() == (RECORD, 0, RECORD), "told of twice, counted once"
    shared.look()
    assert shared.counted() == (RECORD, 0, 0)
    assert shared.offered
    assert blocks_in(shared.store) == 1


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_what_was_dropped_is_not_counted_twice_but_what_came_since_is(
    shared: Shared, later: bool, read: bool
) -> None:
    """One and the same object, or another that somebody else has written under its name."""
    shared.put()
    shared.say(ADDED, -2000)
    if read:
        shared.tier.prepare_load([KEY])
    shared.tier.forget([KEY])
    there = shared.counted()
    assert sum(there) == RECORD
    at_us = 10**7 if later else -1000
    shared.say(ADDED, at_us)
    assert not shared.offered
    assert sum(shared.counted()) == RECORD * (2 if later else 1)


def test_what_is_being_stored_is_counted_once_though_another_has_stored_it(
    shared: Shared,
) -> None:
    assert shared.tier.prepare_store([KEY]).keys == [KEY]
    shared.put()
    shared.say(ADDED, 0)
    assert shared.counted() == (RECORD, 0, 0)
    shared.tier.complete_store([KEY])
    assert shared.offered
    assert shared.counted() == (RECORD, 0, 0)


def test_what_came_again_while_the_former_is_read_is_counted_beside_it(shared: Shared) -> None:
    shared.put()
    shared.say(ADDED, -2000)
    shared.tier.prepare_load([KEY])
    shared.say(REMOVED, -1500)
    shared.say(ADDED, -1000)
    assert not shared.offered
    assert shared.counted() == (RECORD, RECORD, 0)
    shared.tier.complete_load([KEY])
    shared.keeper.refresh()
    shared.tier.tick()
    assert shared.offered
    assert shared.counted() == (RECORD, 0, 0)


def test_a_size_that_is_told_anew_is_what_counts(shared: Shared) -> None:
    shared.put()
    shared.say(ADDED, -2000)
    shared.say(ADDED, -1000, size=RECORD // 2)
    assert shared.counted() == (RECORD // 2, 0, 0)


def test_each_of_many_is_offered_by_its_own_name(shared: Shared) -> None:
    [other] = make_keys(1, start=1)
    shared.say(ADDED, -1000, [0, 3], keys=[KEY, other])
    assert dict(shared.tier.offered()) == {KEY: 0, other: 3}
    spec = shared.tier.prepare_load([KEY, other])
    assert isinstance(spec, ObjectSpec)
    assert spec.generations == [0, 3]


def test_what_a_removal_on_its_way_takes_is_told_by_the_same_audit_if_it_is_there(
    shared: Shared,
) -> None:
    """Whoever is told that it is gone has not listened yet when everything is listed."""
    shared.put()
    shared.say(ADDED, -(10**10))
    shared.say(REMOVED, -1000, keys=make_keys(1, start=1))  # what was said last is told anyhow
    gone = Rows([KEY], [0], [0], [shared.now_us / 1e6])
    shared.keeper.updates.append(Update(removed=gone))
    shared.keeper.refresh()
    shared.tier.tick()
    assert shared.offered
    assert shared.counted() == (RECORD, 0, 0)


def test_room_for_more_blocks_is_made_a_little_at_a_time(shared: Shared) -> None:
    """Half as many again, of millions, kept a request waiting."""
    shared.tier._take_handles(100_000)
    known = len(shared.tier._key_of)
    shared.tier._take_handles(known - 100_000 + 1)
    assert 0 < len(shared.tier._key_of) - known < 20_000
