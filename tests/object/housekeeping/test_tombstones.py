"""Objects that are being deleted: what may come of their names in the meantime."""

from __future__ import annotations

import pytest

from kvtier.backends.object.housekeeping.tombstones import Tombstones
from kvtier.backends.object.object_names import GENERATION_MAX
from kvtier.testing.subject import make_keys

KEY, OTHER = make_keys(2)


@pytest.fixture
def tombstones() -> Tombstones:
    return Tombstones()


def test_the_next_object_has_a_name_that_no_delete_under_way_hits(tombstones: Tombstones) -> None:
    assert tombstones.next_generation(KEY) == 0
    first = tombstones.begin(KEY, 0, 10.0)
    assert tombstones.next_generation(KEY) == 1
    second = tombstones.begin(KEY, 1, 11.0)
    assert tombstones.next_generation(KEY) == 2
    tombstones.end([second])
    assert tombstones.next_generation(KEY) == 2, "one of them is still under way"
    tombstones.end([first])
    assert tombstones.next_generation(KEY) == 0
    assert tombstones.keys() == set()


def test_a_delete_that_is_begun_late_makes_no_name_free(tombstones: Tombstones) -> None:
    tombstones.begin(KEY, 3, 10.0)
    tombstones.begin(KEY, 1, 11.0)
    assert tombstones.next_generation(KEY) == 4
    assert tombstones.next_generation(OTHER) == 0
    assert tombstones.keys() == {KEY}


def test_nobody_copies_all_keys_to_ask_of_a_few(tombstones: Tombstones) -> None:
    """A tier asks for each piece of news, on the engine's thread: of a million keys that were being
    deleted, a copy took it 80 ms each time."""
    keys = tombstones.keys()
    tombstones.begin(KEY, 0, 10.0)
    assert KEY in keys


def test_numbers_of_names_begin_anew(tombstones: Tombstones) -> None:
    tombstones.begin(KEY, GENERATION_MAX - 1, 10.0)
    assert tombstones.next_generation(KEY) == 0


def test_what_is_being_deleted_covers_all_that_is_older(tombstones: Tombstones) -> None:
    assert not tombstones.covers(KEY, 0)
    tombstones.begin(KEY, 2, 10.0)
    assert [tombstones.covers(KEY, generation) for generation in (1, 2, 3)] == [True, True, False]
    assert not tombstones.covers(OTHER, 0)


def test_what_came_under_its_name_since_is_another_object(tombstones: Tombstones) -> None:
    one = tombstones.begin(KEY, 2, 10.0)
    assert [tombstones.knows(KEY, 2, at) for at in (9.0, 10.0, 11.0)] == [True, True, False]
    assert not tombstones.knows(KEY, 1, 9.0)
    tombstones.end([one])
    assert not tombstones.knows(KEY, 2, 9.0), "deleted, and no name of it is kept"
