"""What is to be written down and deleted: nothing is lost, said twice, or said too early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.manual_keepers import LockedStore

from kvtier.backends.object.budget.budget import Budget
from kvtier.backends.object.manifests import outbox as outbox_module
from kvtier.backends.object.manifests.block_rows import Rows
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, SKEW_US
from kvtier.backends.object.manifests.outbox import Outbox
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import StoreError, Unavailable
from kvtier.backends.object.stores.store import Buffer, PutOutcome
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey

KEYS = make_keys(4)
NOW_US = 10**15


class Unwell(LockedStore):
    """It is away at times, too."""

    away = False

    def put(self, name: str, buffers: Sequence[Buffer], **more: Any) -> PutOutcome:
        if self.away:
            raise Unavailable("away")
        return super().put(name, buffers, **more)

    def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
        if self.away:
            raise Unavailable("away")
        return super().delete(names, **more)


class World:
    """An outbox whose clock goes where a test wants it."""

    def __init__(self, folder: Path) -> None:
        self.now_us = NOW_US
        self.freed: list[int] = []
        self.store = Unwell(folder / "store")
        self.budget = Budget(1 << 30, 1, clock=lambda: 0.0)
        self.outbox = Outbox(
            self.store,
            Journal(self.store, NAMESPACE),
            self.budget,
            self.freed.extend,
            lambda: None,
            lambda: self.now_us / 1e6,
        )

    def stated(self) -> list[tuple[int, int]]:
        """Kinds and times of all that is written down."""
        entries = Journal(self.store, NAMESPACE).read_all()
        return list(zip(entries["kind"].tolist(), entries["time_us"].tolist(), strict=True))

    def put(self, key: BlockKey, generation: int = 0) -> str:
        name = block_name(NAMESPACE.id, key, generation)
        self.store.put(name, [])
        return name

    def manifests(self) -> int:
        return len(list(self.store.list(f"{NAMESPACE.id}/manifest/")))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("step_us", [0, -(10**9)])
def test_what_is_said_later_has_a_later_time_by_whatever_clock(world: World, step_us: int) -> None:
    outbox = world.outbox
    assert outbox.added(KEYS[:1], [0], [7]) == NOW_US / 1e6
    world.now_us += step_us
    outbox.removed(KEYS[:1], [0])
    world.now_us += step_us
    assert outbox.now_s() == (NOW_US + 2) / 1e6
    outbox.flush()
    assert world.stated() == [(REMOVED, NOW_US + 1)]
    world.now_us = NOW_US + 500
    outbox.added(KEYS[:1], [0], [7])
    outbox.flush()
    assert world.stated() == [(ADDED, NOW_US + 500)]


def test_what_is_said_is_later_than_what_was_heard_but_for_clocks_beyond_belief(
    world: World,
) -> None:
    outbox = world.outbox
    assert outbox.observe_time(NOW_US + 700) == NOW_US + 700
    assert outbox.observe_time(NOW_US - 700) == NOW_US - 700, "what is older changes nothing"
    assert outbox.now_us() == NOW_US + 701
    assert outbox.observe_time(NOW_US + 10**14) == NOW_US + SKEW_US
    assert outbox.now_us() == NOW_US + SKEW_US + 1


def test_what_corrects_something_is_a_little_later_than_that_and_no_more(world: World) -> None:
    """Whoever stores it again in the meantime is right."""
    world.outbox.removed(KEYS[:1], [0], known_s=(NOW_US - 900) / 1e6)
    rows = Rows(KEYS[1:2], [0], [7], [(NOW_US - 500) / 1e6])
    world.outbox.correct(ADDED, rows)
    world.outbox.flush()
    [removed, added] = world.stated()
    assert (removed[0], added[0]) == (REMOVED, ADDED)
    assert NOW_US - 900 < removed[1] <= NOW_US - 898
    assert NOW_US - 500 < added[1] <= NOW_US - 498


def test_room_is_settled_when_it_is_written_down_and_once(world: World) -> None:
    outbox = world.outbox
    outbox.added(KEYS[:2], [0, 0], [7, 5])
    outbox.removed(KEYS[2:3], [0])
    outbox.correct(ADDED, Rows(KEYS[3:], [0], [100], [1.0]))
    world.store.away = True
    for _ in range(2):
        with pytest.raises(StoreError):
            outbox.flush()
    assert world.budget.settled == 0
    assert not outbox.empty
    world.store.away = False
    outbox.flush()
    assert world.budget.settled == 12
    assert outbox.empty
    assert len(world.stated()) == 4
    outbox.flush()
    assert world.manifests() == 1, "there is nothing more to say"


def test_what_does_not_go_into_one_manifest_is_said_in_several(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_ENTRIES_MAX", 2)
    world.outbox.removed(KEYS[:3], [0] * 3)
    world.outbox.added(KEYS[3:], [0], [7])
    world.outbox.flush()
    assert world.manifests() == 2
    assert [kind for kind, _ in world.stated()] == [REMOVED] * 3 + [ADDED]


def test_a_place_is_free_when_all_its_objects_are_deleted(world: World) -> None:
    outbox, store = world.outbox, world.store
    first, second, third = (world.put(KEYS[0], at) for at in range(3))
    store.locked = second.__eq__
    outbox.delete(5, [(KEYS[0], 0), (KEYS[0], 1)])
    outbox.delete(6, [(KEYS[0], 2)])
    outbox.delete_queued()
    assert world.freed == [6]
    assert [store.head(name) is None for name in (first, second, third)] == [True, False, True]
    assert not outbox.empty
    store.locked = lambda name: False
    outbox.delete_queued()
    assert world.freed == [6], "it is not asked for at once"
    outbox.retry_refused()
    outbox.delete_queued()
    assert world.freed == [6, 5]
    assert outbox.empty


def test_what_could_not_be_deleted_for_the_weather_is_deleted_next_time(world: World) -> None:
    name = world.put(KEYS[0])
    world.outbox.delete(5, [(KEYS[0], 0)])
    world.store.away = True
    world.outbox.delete_queued()
    assert world.freed == []
    assert not world.outbox.empty
    world.store.away = False
    world.outbox.flush()
    assert world.freed == [5]
    assert world.store.head(name) is None
    assert world.outbox.empty
