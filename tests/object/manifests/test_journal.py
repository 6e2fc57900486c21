"""The journal of a namespace: what is new, what joining keeps, what cannot be read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.backends.object import journal as journal_module
from kvtier.backends.object import manifests as manifest
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, Entries
from kvtier.backends.object.stores.errors import AccessDenied, StoreError, Unavailable
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import ObjectInfo
from kvtier.slab.layout import keys_of
from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import BlockKey


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def added(some: list[BlockKey], at: int = 1) -> Entries:
    count = len(some)
    return manifest.pack_entries(ADDED, some, [0] * count, [7] * count, range(at, at + count))


def keys_in(entries: Entries) -> set[BlockKey]:
    return set(keys_of(entries[entries["kind"] == ADDED]))


def manifests(store: FileStore) -> list[str]:
    return [info.name for info in store.list(f"{NAMESPACE.id}/manifest/")]


def test_each_hears_once_of_what_others_append(store: FileStore) -> None:
    one, other = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    first, second = make_keys(3), make_keys(2, start=9)
    one.append(added(first))
    assert keys_in(other.read_new()) == set(first)
    other.append(added(second))
    assert keys_in(other.read_new()) == set()
    assert keys_in(one.read_new()) == set(second)
    assert keys_in(one.read_all()) == set(first + second)


def join(journal: Journal) -> None:
    """As the caretaker does, which knows all that is recorded."""
    journal.join(journal.read_all())


def test_joining_loses_nothing_and_is_no_news(store: FileStore) -> None:
    one, other, late = (Journal(store, NAMESPACE.id) for _ in range(3))
    all_keys = make_keys(40)
    for key in all_keys[:20]:
        one.append(added([key]))
    other.read_new()
    for key in all_keys[20:]:
        one.append(added([key]))
    one.read_new()
    assert one.worth_joining()
    join(one)
    assert len(manifests(store)) == 1
    assert keys_in(other.read_new()) >= set(all_keys[20:])
    assert keys_in(late.read_all()) == set(all_keys)
    assert not one.worth_joining()


def test_two_who_join_at_once_lose_nothing(store: FileStore) -> None:
    all_keys = make_keys(20)
    journals = [Journal(store, NAMESPACE.id) for _ in range(2)]
    for key in all_keys:
        journals[0].append(added([key]))
    delete = store.delete
    store.delete = lambda names, deadline=None: {}  # type: ignore[method-assign]
    for journal in journals:
        join(journal)
    store.delete = delete  # type: ignore[method-assign]
    assert keys_in(Journal(store, NAMESPACE.id).read_all()) == set(all_keys)


def test_a_store_that_deletes_nothing_is_not_filled_by_joining(store: FileStore) -> None:
    def refuse(names: Sequence[str], deadline: float | None = None) -> dict[str, StoreError]:
        return {name: AccessDenied("locked") for name in names}

    journal, delete = Journal(store, NAMESPACE.id), store.delete
    store.delete = refuse  # type: ignore[method-assign]
    all_keys = make_keys(80)
    for key in all_keys:
        journal.append(added([key]))
        journal.read_new()
        if journal.worth_joining():
            join(journal)
    assert len(manifests(store)) <= 80 + 5
    assert keys_in(journal.read_all()) == set(all_keys)
    store.delete = delete  # type: ignore[method-assign]
    join(journal)
    assert len(manifests(store)) == 1, "once it does, they go"
    assert keys_in(Journal(store, NAMESPACE.id).read_all()) == set(all_keys)


def test_a_damaged_manifest_that_cannot_be_deleted_is_told_of_once(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    Journal(store, NAMESPACE.id).append(added(make_keys(2)))
    (name,) = manifests(store)
    path = store.root / name
    path.write_bytes(path.read_bytes()[:-1])
    reader = Journal(store, NAMESPACE.id)
    store.delete = lambda names, deadline=None: dict.fromkeys(names, AccessDenied("locked"))  # type: ignore[method-assign]
    for _ in range(3):
        assert len(reader.read_all()) == 0
        reader.drop_damaged()
    assert len(caplog.records) == 1


def test_a_damaged_manifest_costs_only_itself(store: FileStore) -> None:
    journal = Journal(store, NAMESPACE.id)
    good, bad = make_keys(2), make_keys(2, start=9)
    journal.append(added(good))
    journal.append(added(bad))
    path = store.root / manifests(store)[1]
    path.write_bytes(path.read_bytes()[:-1])
    reader = Journal(store, NAMESPACE.id)
    assert keys_in(reader.read_all()) == set(good)
    reader.drop_damaged()
    assert len(manifests(store)) == 1


def newer(store: FileStore, journal: Journal) -> tuple[Path, bytes]:
    """A manifest of a newer version, and what is in it."""
    before = set(manifests(store))
    journal.append(added(make_keys(2)))
    [name] = set(manifests(store)) - before
    data = bytearray((store.root / name).read_bytes())
    struct.pack_into("<H", data, 8, manifest.VERSION + 1)
    (store.root / name).write_bytes(data)
    return store.root / name, bytes(data)


def test_manifests_of_a_newer_version_are_mentioned_once_and_not_remembered_for_ever(
    store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was updated writes one every few seconds, and joins them."""
    updated, reader = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    for _ in range(20):
        path, _ = newer(store, updated)
        assert len(reader.read_new()) == 0
        path.unlink()
    assert [record.getMessage().count("version 2") for record in caplog.records] == [1]
    reader.read_all()
    held = [len(names) for names in vars(reader).values() if isinstance(names, set | dict)]
    assert sum(held) < 5


def test_a_manifest_of_a_newer_version_is_left_alone(store: FileStore) -> None:
    path, data = newer(store, Journal(store, NAMESPACE.id))
    reader = Journal(store, NAMESPACE.id)
    assert len(reader.read_all()) == 0
    reader.drop_damaged()
    for key in make_keys(20, start=50):
        reader.append(added([key]))
    join(reader)
    assert path.read_bytes() == data


def test_a_look_lists_once(store: FileStore) -> None:
    journal, other = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    for key in make_keys(20):
        other.append(added([key]))
    listings = 0
    list_all = store.list

    def count(*arguments: Any, **options: Any) -> Iterator[ObjectInfo]:
        nonlocal listings
        listings += 1
        return list_all(*arguments, **options)

    store.list = count  # type: ignore[method-assign]
    assert len(journal.read_new()) == 20
    assert listings == 1


def test_what_was_read_before_a_look_failed_is_read_again(store: FileStore) -> None:
    """One manifest vanishes, and the listing that would show its successor fails."""
    writer, reader = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    for key in make_keys(2):
        writer.append(added([key]))
    gone = f"{manifests(store)[1]}"
    list_all, get, listings = store.list, store.get, 0

    def get_others(name: str, *arguments: Any, **options: Any) -> int | None:
        return None if name == gone else get(name, *arguments, **options)

    def list_once(*arguments: Any, **options: Any) -> Iterator[ObjectInfo]:
        nonlocal listings
        listings += 1
        if listings > 1:
            raise Unavailable("not now")
        return list_all(*arguments, **options)

    store.get, store.list = get_others, list_once  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        reader.read_new()
    store.get, store.list = get, list_all  # type: ignore[method-assign]
    assert keys_in(reader.read_new()) == set(make_keys(2))
    assert keys_in(reader.read_new()) == set()


def test_what_was_damaged_here_is_taken_from_those_who_could_read_it(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_HEAD_READ_BYTES", 1500)  # so heads are read alone
    one, other = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    all_keys = make_keys(40)
    for key in all_keys:
        one.append(added([key]))
    path = store.root / manifests(store)[3]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert keys_in(other.read_new()) == set(all_keys) - {all_keys[3]}
    path.write_bytes(whole)
    join(one)
    assert keys_in(other.read_new()) == {all_keys[3]}


def test_a_long_manifest_that_joins_none_is_read_by_whoever_knows_others(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_HEAD_READ_BYTES", 1500)
    one, other = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    one.append(added(make_keys(1)))
    other.read_new()
    one.append(added(make_keys(100, start=10)))
    assert keys_in(other.read_new()) == set(make_keys(100, start=10))


def test_what_was_told_is_not_told_again_when_it_is_joined(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETURNED_MAX", 30)
    one, other = Journal(store, NAMESPACE.id), Journal(store, NAMESPACE.id)
    all_keys = make_keys(40)
    one.append(added(all_keys[:10], at=1))
    other.read_all()
    for at, key in enumerate(all_keys[10:35]):
        one.append(added([key], at=100 + at))
    other.read_new()
    for at, key in enumerate(all_keys[35:]):
        one.append(added([key], at=200 + at))
    one.append(added(all_keys[30:31], at=300))
    join(one)
    heard = other.read_new()
    assert keys_in(heard) == {*all_keys[:5], *all_keys[30:31], *all_keys[35:]}, "of the last 30"
    assert len(heard) == 11


def test_more_manifests_than_memory_should_hold_are_not_read(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(store, NAMESPACE.id)
    journal.append(added(make_keys(3)))
    journal.append(added(make_keys(20, start=10)))
    monkeypatch.setattr(journal_module, "MANIFEST_BYTES_MAX", 1000)
    reader = Journal(store, NAMESPACE.id)
    for _ in range(2):
        assert keys_in(reader.read_all()) == set(make_keys(3))
    assert len(caplog.records) == 1, "it is said once"
