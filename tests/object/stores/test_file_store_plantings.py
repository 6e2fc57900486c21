"""Links, FIFOs, devices and the like, planted at every level of a `file://` store."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support.object.object_subjects import FOLDER

from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.stores.store import Store
from kvtier.testing.subject import Rig, make_keys

NAMES = [
    "ns/namespace.json",
    "ns/blocks/ab/abcd-0",
    "ns/manifest/0001-0001",
    "ns/uses/writer",
    "caretaker/0001-0001",
    "plain",
]
PLACES = sorted({"/".join(name.split("/")[:depth]) for name in NAMES for depth in range(1, 5)})


def _folder_link(at: Path, outside: Path) -> None:
    at.symlink_to(outside / "folder")


def _file_link(at: Path, outside: Path) -> None:
    at.symlink_to(outside / "file")


def _hard_link(at: Path, outside: Path) -> None:
    os.link(outside / "file", at)


def _loop(at: Path, outside: Path) -> None:
    at.symlink_to(at)


def _dangling(at: Path, outside: Path) -> None:
    at.symlink_to(outside / "new")


def _upward(at: Path, outside: Path) -> None:
    at.symlink_to("..")


def _fifo(at: Path, outside: Path) -> None:
    os.mkfifo(at)


def _socket(at: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(at.parent):
        made.bind("s")  # whose path must be short
    (at.parent / "s").rename(at)


def _device(at: Path, outside: Path) -> None:
    try:
        os.mknod(at, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


def _folder(at: Path, outside: Path) -> None:
    (at / "inner").mkdir(parents=True)


def _file(at: Path, outside: Path) -> None:
    at.write_bytes(b"not ours")


PLANTS = [
    *(_folder_link, _file_link, _hard_link, _loop, _dangling, _upward),
    *(_fifo, _socket, _device, _folder, _file),
]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that looks like a store, with one file."""
    found = tmp_path / "outside"
    for name in NAMES:
        path = found / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"theirs")
        path = found / "folder" / Path(name).name
        path.write_bytes(b"theirs")
    (found / "file").write_bytes(b"theirs")
    (found / "folder" / ".tmp-old").write_bytes(b"half")
    return found


def seen(folder: Path) -> list[tuple[str, bytes | None]]:
    return sorted(
        (str(path), path.read_bytes() if path.is_file() else None) for path in folder.rglob("*")
    )


def remove(path: Path) -> None:
    """Whatever lies there, with what lies below it."""
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            remove(inner)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def use(store: Store) -> None:
    """Everything that can be done with these names. Errors are typed."""
    into = memoryview(bytearray(64))
    calls: list[Callable[[str], object]] = [
        lambda name: store.get(name, into),
        lambda name: store.head(name),
        lambda name: list(store.list(name)),
        lambda name: list(store.list(f"{name}/")),
        lambda name: store.put(name, [memoryview(b"ours")], if_absent=True),
        lambda name: store.put(name, [memoryview(b"ours")]),
        lambda name: store.get(name, into),
        lambda name: list(store.sweep(-1.0)),
        lambda name: store.delete([name, f"{name}/below"]),
    ]
    for call in calls:
        for name in NAMES:
            with contextlib.suppress(StoreError):
                call(name)
    names = [info.name for info in store.list()]
    assert not store.delete(names)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_nothing_outside_is_read_or_changed(
    tmp_path: Path, outside: Path, place: str, plant: Callable[[Path, Path], None]
) -> None:
    store = FileStore(tmp_path / "store")
    for name in NAMES:
        store.put(name, [memoryview(b"ours")])
    at = store.root / place
    remove(at)
    plant(at, outside)
    before = seen(outside)
    into = bytearray(64)
    for name in NAMES:
        with contextlib.suppress(StoreError):
            found = store.get(name, memoryview(into))
            theirs = found is not None and bytes(into[:found]) == b"theirs"
            assert not theirs or plant is _hard_link, "a hard link is a file of this folder"
    use(store)
    assert seen(outside) == before


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_tier_serves_on_and_leaves_the_outside_alone(
    tmp_path: Path, outside: Path, plant: Callable[[Path, Path], None]
) -> None:
    """Whatever of what a tier writes is replaced: one file and one folder of each kind."""
    before, turn, places = seen(outside), 0, [Path()]
    while turn < len(places):
        (tmp_path / str(turn)).mkdir()
        rig = Rig(FOLDER, tmp_path / str(turn), blocks=8)
        keys = make_keys(4)
        assert rig.put(keys) == keys
        rig.settle()
        root = tmp_path / str(turn) / "store"
        if turn == 0:
            folders = [Path(at) for at, _, _ in os.walk(root)]
            places = [next(one.iterdir()).relative_to(root) for one in folders]
        at = root / places[turn]
        remove(at)
        plant(at, outside)
        rig.get(keys)
        rig.put(make_keys(4, start=10))
        rig.settle()
        rig.close()
        assert seen(outside) == before
        turn += 1
    assert turn > 5
