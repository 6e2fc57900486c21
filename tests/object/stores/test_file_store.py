"""What a folder adds to the contract: rights, crashes, a full disk, and a folder that vanishes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.object.file_stores import get, put

from kvtier.backends.object import writer_ids
from kvtier.backends.object.stores import errors, file_store
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import PutOutcome
from kvtier.system.disk import AnyPath, Disk


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def test_files_and_folders_are_private(store: FileStore) -> None:
    put(store, "ab/cd/name")
    found = [store.root, *store.root.rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_where_a_folder_would_have_to_be_lies_an_object(store: FileStore) -> None:
    put(store, "a")
    assert get(store, "a/b") is None
    assert store.head("a/b") is None
    assert list(store.list("a/")) == []
    assert store.delete(["a/b"]) == {}
    assert get(store, "a") is not None


def test_what_cannot_be_deleted_keeps_nothing_else_there(store: FileStore) -> None:
    put(store, "a/b")
    put(store, "c")
    failed = store.delete(["a", "c"])
    assert list(failed) == ["a"]
    assert isinstance(failed["a"], errors.InvalidName)
    assert [info.name for info in store.list()] == ["a/b"]
    late = store.delete(["a/b"], deadline=time.monotonic())
    assert isinstance(late["a/b"], errors.TimedOut)
    assert get(store, "a/b") is not None


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_file_system_without_links(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def link(source: str, target: str, **_: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", link)
    for outcome in (PutOutcome.STORED, PutOutcome.ALREADY_THERE):
        assert store.put("name", [memoryview(b"bytes")], if_absent=True) is outcome
    assert [path.name for path in store.root.iterdir()] == ["name"]


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("refusal", [None, errno.EEXIST, errno.ENOSPC])
def test_whatever_becomes_of_it_no_unfinished_file_or_empty_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool, refusal: int | None
) -> None:
    def refuse(source: AnyPath, target: AnyPath, **_: object) -> None:
        assert refusal is not None
        raise OSError(refusal, os.strerror(refusal))

    disk = Disk()
    store = FileStore(tmp_path / "store", disk=disk)
    if refusal is not None:
        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr(disk, "rename", refuse)
    stored = None
    with contextlib.suppress(errors.StoreFull, errors.Unavailable):
        stored = store.put("a/name", [memoryview(b"bytes")], if_absent=if_absent)
    if refusal == errno.EEXIST and if_absent:
        assert stored is PutOutcome.ALREADY_THERE
    else:
        assert stored is (None if refusal else PutOutcome.STORED)
    left = [path.name for path in store.root.rglob("*")]
    there = {PutOutcome.STORED: ["a", "name"], PutOutcome.ALREADY_THERE: ["a"]}  # another's object
    assert left == (there[stored] if stored else [])


class Piecemeal(Disk):
    """Moves five bytes at a time."""

    def readv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        return super().readv(fd, [into[0][:5]], offset)

    def writev(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        return super().writev(fd, [data[0][:5]], offset)


def test_a_file_system_that_moves_less_than_it_is_told_to(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", disk=Piecemeal())
    pieces = [b"ab", b"cdefghijklmnop", b"q", b"", b"rstuvw", b"xyz"]
    store.put("name", [memoryview(piece) for piece in pieces])
    assert (store.root / "name").read_bytes() == b"".join(pieces)
    into = bytearray(26)
    assert store.get("name", memoryview(into)) is not None
    assert into == b"".join(pieces)


def test_a_file_that_is_cut_short_while_it_is_read_is_no_object(tmp_path: Path) -> None:
    class Cut(Disk):
        def readv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            os.truncate(tmp_path / "store" / "name", 3)
            return super().readv(fd, into, offset)

    store = FileStore(tmp_path / "store", disk=Cut())
    put(store, "name")
    with pytest.raises(errors.LengthMismatch):
        get(store, "name")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EFBIG, errors.StoreFull),
        (errno.EACCES, errors.AccessDenied),
        (errno.EPERM, errors.AccessDenied),
        (errno.EROFS, errors.AccessDenied),
        (errno.EISDIR, errors.InvalidName),
        (errno.ENOTDIR, errors.NoSuchBucket),
        (errno.EIO, errors.Unavailable),
    ],
)
def test_every_refusal_of_the_system_has_its_meaning(
    tmp_path: Path, number: int, kind: type[errors.StoreError]
) -> None:
    class Refusing(Disk):
        def rename(self, source: AnyPath, target: AnyPath) -> None:
            raise OSError(number, os.strerror(number))

    with pytest.raises(kind, match=os.strerror(number)) as caught:
        put(FileStore(tmp_path / "store", disk=Refusing()), "name")
    assert type(caught.value) is kind


def test_what_others_keep_there_is_neither_listed_nor_touched(store: FileStore) -> None:
    foreign = store.root / "notes of mine.txt"
    foreign.write_text("keep")
    (store.root / ".uncatalogued").write_text("keep")
    put(store, "ours")
    assert [info.name for info in store.list()] == ["ours"]
    store.delete(["ours"])
    list(store.sweep(older_than_s=-1))
    assert foreign.read_text() == "keep"


def test_folders_deeper_than_any_name_are_passed_by(store: FileStore) -> None:
    deepest = "/".join("abcdefghijklmnop")  # sixteen, as many as there may be
    put(store, deepest)
    (store.root / deepest).with_name(".tmp-1-dead").write_bytes(b"half")
    put(store, "z")
    strange = store.root / "b"
    strange.mkdir()
    folder = os.open(strange, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit()):
        os.mkdir("b", dir_fd=folder)
        inner = os.open("b", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    try:
        assert [info.name for info in store.list()] == [deepest, "z"]
        assert sum(store.sweep(older_than_s=-1)) == 1
    finally:
        subprocess.run(["rm", "-r", strange], check=True)  # pytest could not


def test_a_crash_leaves_what_sweep_removes(store: FileStore) -> None:
    put(store, "ab/name")
    torn = store.root / "ab" / ".tmp-1-dead"
    torn.write_bytes(b"half")
    assert [info.name for info in store.list()] == ["ab/name"]
    assert sum(store.sweep(older_than_s=3600)) == 0
    assert sum(store.sweep(older_than_s=-1)) == 1
    assert not torn.exists()


def test_a_sandbox_that_does_not_say_which_machine_it_is(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writers know of themselves that they live, and of all others that they may."""

    def unsaid(path: Path) -> Path:
        raise FileNotFoundError(path)

    elsewhere = writer_ids.new_writer_id()
    monkeypatch.setattr(Path, "readlink", unsaid)
    writer_ids._machine.cache_clear()
    try:
        assert writer_ids.may_live(writer_ids.new_writer_id())
        assert writer_ids.may_live(elsewhere)
        put(store, "name")
    finally:
        writer_ids._machine.cache_clear()


def test_what_the_dead_of_this_machine_left_goes_at_once(store: FileStore) -> None:
    child = os.fork()
    if not child:
        (store.root / f".tmp-{writer_ids.process_writer_id()}-1").write_bytes(b"half")
        os._exit(0)
    os.waitpid(child, 0)
    ours = store.root / f".tmp-{writer_ids.process_writer_id()}-2"
    ours.write_bytes(b"half")
    assert sum(store.sweep(older_than_s=3600)) == 1
    assert [path.name for path in store.root.iterdir()] == [ours.name]


def test_a_full_disk_is_store_full_and_leaves_nothing(store: FileStore) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(errors.StoreFull):
            put(store, "a/b/big", bytes(300_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(store.root.iterdir()) == []


def test_a_quota_that_is_told_of_at_the_end_leaves_nothing(tmp_path: Path) -> None:
    """As over a network, where what was written is sent when the file is closed."""

    class Late(Disk):
        def close(self, fd: int) -> None:
            super().close(fd)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = FileStore(tmp_path / "store", disk=Late())
    with pytest.raises(errors.StoreFull):
        put(store, "name")
    assert list(store.root.iterdir()) == []


def test_two_may_make_the_same_folder(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def twice(path: str, mode: int, **at: int) -> None:
        mkdir(path, mode, **at)
        mkdir(path, mode, **at)

    monkeypatch.setattr(os, "mkdir", twice)
    assert put(store, "ab/cd/name") is PutOutcome.STORED


def test_two_may_sweep_at_once(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (store.root / f".tmp-{number}").write_bytes(b"half")
    unlink = os.unlink

    def beside_another(path: str, **at: int) -> None:
        for each in store.root.iterdir():
            unlink(each)
        unlink(path, **at)

    monkeypatch.setattr(os, "unlink", beside_another)
    assert sum(store.sweep(older_than_s=-1)) == 0
    assert list(store.root.iterdir()) == []


def test_a_root_whose_parent_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSuchBucket):
        FileStore(tmp_path / "no" / "such")


def test_empty_folders_vanish_with_their_last_object(store: FileStore) -> None:
    put(store, "a/b/c/one")
    put(store, "a/two")
    store.delete(["a/b/c/one"])
    assert not (store.root / "a" / "b").exists()
    assert get(store, "a/two") is not None


def test_no_name_is_kept_for_ever(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path` interns its parts, and Python 3.12 up to 3.12.5 frees nothing that is interned."""
    parts: list[str] = []
    intern = sys.intern

    def spy(text: str) -> str:
        parts.append(text)
        return intern(text)

    put(store, "ab/cd/first")  # reads what a process asks for once: that is kept, and stays one
    store.delete(["ab/cd/first"])
    monkeypatch.setattr(sys, "intern", spy)
    put(store, "ab/cd/name")
    store.put("ab/cd/other", [memoryview(b"bytes")], if_absent=True)
    assert get(store, "ab/cd/name") is not None
    assert store.head("ab/cd/name") is not None
    assert len(list(store.list())) == 2
    assert not store.delete(["ab/cd/name", "ab/cd/other"])
    assert list(store.sweep(0.0))
    assert parts == []


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
    listed = file_store._entries

    def late(fd: int, folder: str) -> Iterator[Any]:
        old = store.root / "a" / "old"
        for found in listed(fd, folder):
            if found is not None and found.name == "a/old":
                old.rename(old.with_name("new"))
                found = None
            yield found

    monkeypatch.setattr(file_store, "_entries", late)
    assert [info.name for info in store.list()] == ["a/new"]


def test_what_vanishes_in_every_look_hides_nothing_else(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the folder of claims, where hundreds of servers renew theirs, and each file that is
    looked at takes a network's time."""
    for number in range(20):
        put(store, f"a/goes{number}")
        put(store, f"a/stays{number}")
    listed = file_store._entries

    def beside_a_busy_server(fd: int, folder: str) -> Iterator[Any]:
        for at, found in enumerate(listed(fd, folder)):
            if folder == "a/" and at == 0:
                left = (store.root / "a").glob("goes*")
                next(one for one in left if one.name != found.name[2:]).unlink()
            yield found

    monkeypatch.setattr(file_store, "_entries", beside_a_busy_server)
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

    def late(path: str, mode: int, **at: int) -> None:
        nonlocal left
        if path == "cd" and left:
            left -= 1
            (store.root / "ab").rmdir()
        mkdir(path, mode, **at)

    monkeypatch.setattr(os, "mkdir", late)
    assert put(store, "ab/cd/name") is PutOutcome.STORED
    assert left == 0
    assert get(store, "ab/cd/name") is not None


def test_a_folder_that_never_stays_is_worth_another_try_and_no_fault_of_the_store(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(path: str, mode: int, **_: int) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "mkdir", never)
    with pytest.raises(errors.Conflict) as caught:
        put(store, "ab/name")
    assert caught.value.retryable
    assert not caught.value.unwell
    store.root.rmdir()
    with pytest.raises(errors.NoSuchBucket):
        put(store, "ab/name")
