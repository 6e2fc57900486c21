"""Garbage collected without a server: what goes, what stays, and who hears of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object.manual_keepers import LockedStore
from support.object.object_subjects import FOLDER

from kvtier.backends.object import namespaces
from kvtier.backends.object.caretaker import Limits
from kvtier.backends.object.inspection import store_access as gc
from kvtier.backends.object.lease import LeaseLost
from kvtier.backends.object.object_names import block_name, description_name, parse_block
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Store
from kvtier.testing.subject import GROUPED, NAMESPACE, Rig, make_keys
from kvtier.types import BlockKey, Namespace

RECORD = 12288


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(FOLDER, tmp_path, blocks=8)
    yield rig
    rig.close()


def limits(blocks: int, age_max_s: float | None = None) -> Limits:
    return Limits(blocks * RECORD, 0.2, 600.0, age_max_s)


def age(rig: Rig, key: BlockKey, seconds: float) -> None:
    path = rig.folder / "store" / block_name(NAMESPACE.id, key)
    os.utime(path, (time.time() - seconds,) * 2)


def due(store: Store, blocks: int, age_max_s: float | None = None) -> int:
    """How many blocks of a survey should go."""
    return gc.survey(store, blocks * RECORD, age_max_s, time.time())[0] // RECORD


def test_the_oldest_go_first_until_the_budget_holds(rig: Rig) -> None:
    keys = make_keys(6)
    for key in keys:
        rig.put([key])
    rig.close()
    store = FileStore(rig.folder / "store")
    assert due(store, 4) == 2
    assert gc.collect(store, limits(4)) == 0
    assert due(store, 4) == 0
    rig.reopen()
    assert rig.resident(keys) == keys[2:]
    assert rig.get(keys[2:]) == keys[2:]


def test_beside_a_server_it_is_the_server_that_deletes(rig: Rig) -> None:
    keys = rig.put(make_keys(6))
    with pytest.raises(LeaseLost):
        gc.collect(FileStore(rig.folder / "store"), limits(4))
    assert rig.get(keys) == keys


def test_all_namespaces_share_the_budget_and_other_files_are_safe(rig: Rig, tmp_path: Path) -> None:
    rig.put(make_keys(3))
    other = Rig(FOLDER, tmp_path, blocks=8, namespace=GROUPED)
    while not other.put(make_keys(1)):  # it waits for its share
        rig.settle()
        other.settle()
    store = FileStore(tmp_path / "store")
    store.put("notes/mine", [memoryview(b"keep")])
    (tmp_path / "store" / "plain.txt").write_text("keep")
    rig.close()
    other.close()
    assert gc.collect(store, limits(0)) == 0
    left = [info.name for info in store.list()]
    assert "notes/mine" in left
    assert not any(map(parse_block, left))
    assert (tmp_path / "store" / "plain.txt").read_text() == "keep"


def test_a_new_namespace_gets_room_from_an_old_one(tmp_path: Path) -> None:
    old = Rig(FOLDER, tmp_path, blocks=8)
    old.put(make_keys(8))
    old.close()
    newer = Namespace(facts={"model": "newer"}, group_bytes=NAMESPACE.group_bytes)
    new = Rig(FOLDER, tmp_path, blocks=8, namespace=newer)
    for start in range(10, 100, 10):
        new.put(make_keys(4, start=start))
        new.settle()
    assert len(new.resident(make_keys(100))) >= 4, "the oldest blocks of the other have gone"
    new.close()


def test_what_told_of_blocks_that_went_is_found_when_it_is_old(rig: Rig) -> None:
    rig.put(make_keys(3))
    rig.close()
    store = FileStore(rig.folder / "store")
    gc.collect(store, limits(0))
    now = time.time()
    assert gc.survey(store, 1 << 40, None, now) == (0, {}), "somebody may be about to come back"
    assert not namespaces.remove(store, NAMESPACE.id, gc.store_time(now))
    later = now + 2 * 3600.0 + 1.0
    _, empty = gc.survey(store, 1 << 40, None, later)
    assert list(empty) == [NAMESPACE.id]
    assert empty[NAMESPACE.id] > 0
    assert namespaces.remove(store, NAMESPACE.id, gc.store_time(later))
    assert [info.name for info in store.list() if "caretaker/" not in info.name] == []
    assert gc.survey(store, 1 << 40, None, later) == (0, {})
    rig.reopen()
    assert rig.put(make_keys(3)) == make_keys(3)


def test_what_is_too_old_goes_and_makes_room_for_what_is_not(rig: Rig) -> None:
    keys = rig.put(make_keys(4))
    for key, seconds in zip(keys, (5000.0, 4000.0, 200.0, 100.0), strict=True):
        age(rig, key, seconds)
    rig.close()
    store = FileStore(rig.folder / "store")
    assert [due(store, blocks, 3600.0) for blocks in (8, 2, 1, 0)] == [2, 2, 3, 4]
    assert gc.collect(store, limits(2, 3600.0)) == 0
    assert {parse_block(info.name) for info in store.list(f"{NAMESPACE.id}/blocks/")} == {
        (NAMESPACE.id, key, 0) for key in keys[2:]
    }


def test_blocks_go_though_nothing_says_what_they_mean(rig: Rig) -> None:
    rig.put(make_keys(3))
    rig.close()
    (rig.folder / "store" / description_name(NAMESPACE.id)).write_bytes(b"{")
    store = FileStore(rig.folder / "store")
    assert gc.collect(store, limits(0)) == 0
    assert due(store, 0) == 0


def test_what_could_not_be_deleted_is_counted(rig: Rig) -> None:
    keys = rig.put(make_keys(3))
    rig.close()
    locked = block_name(NAMESPACE.id, keys[0])
    store = LockedStore(rig.folder / "store", locked.__eq__)
    assert gc.collect(store, limits(0)) == 1
    assert [info.name for info in store.list(f"{NAMESPACE.id}/blocks/")] == [locked]
