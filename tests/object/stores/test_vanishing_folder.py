"""A folder, or one within it, that goes away or comes back while it is used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object.file_stores import get, put

from kvtier.backends.object.stores import errors, folder_listing
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import PutOutcome


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def test_a_folder_that_goes_away_is_said_so(store: FileStore) -> None:
    store.root.rmdir()
    with pytest.raises(errors.NoSuchBucket, match="create the folder"):
        list(store.list())
    with pytest.raises(errors.NoSuchBucket, match="create the folder"):
        put(store, "ab/name")
    assert not store.root.exists(), "what is mounted there may come back"


def test_what_is_missing_while_the_folder_is_away_is_not_gone(store: FileStore) -> None:
    put(store, "ab/name")
    store.root.rename(store.root.with_name("away"))
    with pytest.raises(errors.NoSuchBucket):
        get(store, "ab/name")
    with pytest.raises(errors.NoSuchBucket):
        store.head("ab/name")
    with pytest.raises(errors.NoSuchBucket):
        store.delete(["ab/name"])
    store.root.with_name("away").rename(store.root)
    assert get(store, "ab/name") is not None


@pytest.mark.parametrize("bare", [False, True])
def test_a_listing_amid_which_the_folder_goes_away_does_not_just_end(
    tmp_path: Path, bare: bool
) -> None:
    """Whatever is not listed would be taken for gone, and deleted when the folder is back."""
    root, mounted = tmp_path / "store", tmp_path / "mounted"
    mounted.mkdir()
    root.symlink_to(mounted)
    store = FileStore(root)
    for name in ("aa/name", "bb/name", "cc/name"):
        put(store, name)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:  # on another device
        listing = store.list()
        assert next(listing).name == "aa/name"
        root.unlink()
        if bare:
            root.symlink_to(other)
        with pytest.raises(errors.NoSuchBucket):
            list(listing)


def test_the_bare_mount_point_of_a_folder_that_is_away_is_neither_read_nor_filled(
    tmp_path: Path,
) -> None:
    """Nothing lies there, and what is written there fills the system's own disk."""
    root = tmp_path / "store"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:  # on another device
        root.symlink_to(other)
        store = FileStore(root)
        put(store, "ab/name")
        root.unlink()
        root.mkdir()
        for ask in (
            lambda: get(store, "ab/name"),
            lambda: store.head("ab/name"),
            lambda: list(store.list()),
            lambda: store.delete(["ab/name"]),
            lambda: put(store, "cd/name"),
        ):
            with pytest.raises(errors.NoSuchBucket, match="not mounted any more"):
                ask()
        assert not list(root.iterdir())
        root.rmdir()
        root.symlink_to(other)
        assert get(store, "ab/name") is not None
        put(store, "cd/name")
        assert [info.name for info in store.list()] == ["ab/name", "cd/name"]


def test_what_takes_the_place_of_what_vanishes_is_listed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a/old")
    listed = folder_listing._entries

    def late(path: str, folder: str) -> Iterator[Any]:
        old = store.root / "a" / "old"
        for found in listed(path, folder):
            if found is not None and found.name == "a/old":
                old.rename(old.with_name("new"))
                found = None
            yield found

    monkeypatch.setattr(folder_listing, "_entries", late)
    assert [info.name for info in store.list()] == ["a/new"]


def test_a_folder_that_is_made_anew_while_it_is_listed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a/old")
    scan = os.scandir

    def late(path: str) -> Any:
        if path.endswith("/a/") and store.head("a/old") is not None:
            store.delete(["a/old"])
            try:
                return scan(path)
            finally:
                put(store, "a/new")
        return scan(path)

    monkeypatch.setattr(os, "scandir", late)
    assert [info.name for info in store.list()] == ["a/new"]


def test_what_vanishes_in_every_look_hides_nothing_else(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the folder of claims, where hundreds of servers renew theirs, and each file that is
    looked at takes a network's time."""
    for number in range(20):
        put(store, f"a/goes{number}")
        put(store, f"a/stays{number}")
    listed = folder_listing._entries

    def beside_a_busy_server(path: str, folder: str) -> Iterator[Any]:
        for at, found in enumerate(listed(path, folder)):
            if folder == "a/" and at == 0:
                left = (store.root / "a").glob("goes*")
                next(one for one in left if one.name != found.name[2:]).unlink()
            yield found

    monkeypatch.setattr(folder_listing, "_entries", beside_a_busy_server)
    names = [info.name for info in store.list() if "stays" in info.name]
    assert len(names) == 20
    assert 0 < len(list((store.root / "a").glob("goes*"))) < 20


@pytest.mark.parametrize("times", [1, 7])
def test_folders_that_vanish_while_they_are_made_are_made_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Somebody deletes the last object beside it, each time at the worst moment."""
    left = times
    mkdir = os.mkdir

    def late(path: str, mode: int) -> None:
        nonlocal left
        if path.endswith("/ab/cd") and left:
            left -= 1
            (store.root / "ab").rmdir()
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", late)
    assert put(store, "ab/cd/name") is PutOutcome.STORED
    assert left == 0
    assert get(store, "ab/cd/name") is not None


def test_a_folder_that_never_stays_is_worth_another_try_and_no_fault_of_the_store(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(path: str, mode: int) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "mkdir", never)
    with pytest.raises(errors.Conflict) as caught:
        put(store, "ab/name")
    assert caught.value.retryable
    assert not caught.value.unwell
    store.root.rmdir()
    with pytest.raises(errors.NoSuchBucket):
        put(store, "ab/name")
