"""Garbage collected without a server: what goes, what stays, and who hears of it."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object.manual_keepers import LockedStore, UnwellStore
from support.object.object_subjects import FOLDER

from kvtier.backends.object.inspection import garbage as gc
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import REMOVED
from kvtier.backends.object.object_names import block_name, description_name, parse_block
from kvtier.backends.object.stores.errors import Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import GROUPED, NAMESPACE, Rig, make_keys
from kvtier.types import BlockKey, Namespace, block_key

RECORD = 12288


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(FOLDER, tmp_path, blocks=8)
    yield rig
    rig.close()


def age(rig: Rig, key: BlockKey, seconds: float) -> None:
    path = rig.folder / "store" / block_name(NAMESPACE.id, key)
    os.utime(path, (time.time() - seconds,) * 2)


def test_the_oldest_go_first_until_the_budget_holds(rig: Rig) -> None:
    keys = rig.put(make_keys(6))
    for index, key in enumerate(keys):
        age(rig, key, 1000 - 100 * index)
    store = FileStore(rig.folder / "store")
    found = gc.survey(store, 4 * RECORD, None, time.time())
    assert {parse_block(one.name) for one in found.garbage} == {
        (NAMESPACE.id, key, 0) for key in keys[:2]
    }
    assert rig.get(keys) == keys, "a survey deletes nothing"
    assert gc.collect(store, found) == 2
    rig.tier.refresh()
    rig.tier.tick()
    assert rig.resident(keys) == keys[2:], "a running server hears of it"
    assert rig.get(keys[2:]) == keys[2:]


def test_what_was_deleted_is_written_down_though_the_store_goes_away_amid_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [None, None, Unavailable("away")]
    monkeypatch.setattr(gc, "_AT_ONCE", 2)
    keys = rig.put(make_keys(6))
    rig.tier.flush()
    store = UnwellStore(rig.folder / "store")
    store.fails = lambda call, name: left.pop(0) if call == "delete" else None
    with pytest.raises(Unavailable):
        gc.collect(store, gc.survey(store, 0, None, time.time()))
    entries = Journal(store, NAMESPACE.id).read_all()
    assert entries["kind"].tolist().count(REMOVED) == 4
    rig.tier.refresh()
    rig.tier.tick()
    assert len(rig.resident(keys)) == 2


def test_all_namespaces_share_the_budget_and_other_files_are_safe(rig: Rig, tmp_path: Path) -> None:
    rig.put(make_keys(3))
    other = Rig(FOLDER, tmp_path, blocks=8, namespace=GROUPED)
    while not other.put(make_keys(1)):  # it waits for its share
        rig.settle()
        other.settle()
    store = FileStore(tmp_path / "store")
    store.put("notes/mine", [memoryview(b"keep")])
    (tmp_path / "store" / "plain.txt").write_text("keep")
    found = gc.survey(store, 0, None, time.time())
    assert gc.collect(store, found) == 4
    left = [info.name for info in store.list() if parse_block(info.name) is None]
    assert "notes/mine" in left
    assert (tmp_path / "store" / "plain.txt").read_text() == "keep"
    other.close()


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


@pytest.mark.slow
def test_of_what_stays_no_list_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 20_000
    store = FileStore(tmp_path)

    def listed() -> Iterator[ObjectInfo]:
        for number in range(blocks):
            name = block_name(NAMESPACE.id, block_key(number.to_bytes(8, "big") * 4))
            yield ObjectInfo(name, 10, 1000.0 + number % 100)

    monkeypatch.setattr(store, "list", listed)
    tracemalloc.start()
    try:
        found = gc.survey(store, blocks * 10 - 25, None, 5000.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [one.modified_s for one in found.garbage] == [1000.0] * 3
    assert peak < 50 * blocks, "names alone take three times as much"


def test_what_is_too_old_goes_and_makes_room_for_what_is_not(rig: Rig) -> None:
    keys = rig.put(make_keys(4))
    for key, seconds in zip(keys, (5000.0, 4000.0, 200.0, 100.0), strict=True):
        age(rig, key, seconds)
    store = FileStore(rig.folder / "store")
    for capacity, over in ((1 << 20, []), (2, []), (1, keys[2:3]), (0, keys[2:])):
        found = gc.survey(store, capacity * RECORD, 3600.0, time.time())
        names = [block_name(NAMESPACE.id, key) for key in [*keys[:2], *over]]
        assert [one.name for one in found.garbage] == names
        assert found.garbage_bytes == (2 + len(over)) * RECORD


def test_blocks_go_though_nothing_says_what_they_mean(rig: Rig) -> None:
    rig.put(make_keys(3))
    (rig.folder / "store" / description_name(NAMESPACE.id)).write_bytes(b"{")
    store = FileStore(rig.folder / "store")
    assert gc.collect(store, gc.survey(store, 0, None, time.time())) == 3


def test_what_could_not_be_deleted_is_not_said_to_be_gone(rig: Rig) -> None:
    keys = rig.put(make_keys(3))
    rig.tier.flush()
    locked = block_name(NAMESPACE.id, keys[0])
    store = LockedStore(rig.folder / "store", locked.__eq__)
    assert gc.collect(store, gc.survey(store, 0, None, time.time())) == 2
    entries = Journal(store, NAMESPACE.id).read_all()
    removed = entries[entries["kind"] == REMOVED]
    assert set(keys_of(removed)) == set(keys[1:])
    rig.tier.refresh()
    rig.tier.tick()
    assert rig.get(keys) == keys[:1]
