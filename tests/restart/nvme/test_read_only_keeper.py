"""A folder that may only be read: served as it is, and left as it is."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
from support.tiers.nvme_rig import Engine, child, expect, open_files

from kvtier.backends.nvme import BACKEND, NvmeHandler, NvmeSettings, NvmeTier
from kvtier.errors import MediumError
from kvtier.eviction import create_policy
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, WritePolicy
from kvtier.slab.folder import FolderLimits
from kvtier.slab.keeper import ReadOnlyFolder, ReadOnlySlabKeeper
from kvtier.system.disk import AnyPath, Disk
from kvtier.testing.subject import NAMESPACE, make_keys, sealed
from kvtier.types import Namespace, Outcome

OTHER = Namespace(facts={"model": "test", "dtype": "another"}, group_bytes=(8192,))


class Guest(Engine):
    """An engine that may only read."""

    def __init__(self, root: Path, namespace: Namespace = NAMESPACE) -> None:
        self.namespace, self.root = namespace, root
        slot = record_bytes(namespace.payload_bytes)
        limits = FolderLimits(1 << 30, 0, slot_bytes=slot, slab_bytes=1 << 20, grows=False)
        self.keeper = ReadOnlySlabKeeper(ReadOnlyFolder(root, namespace, Disk()), limits)
        self.tier = NvmeTier(self.keeper, create_policy("lru"))
        self.handler = NvmeHandler(
            root, namespace, threads=2, direct=True, power_safe=False, only_read=True
        )


class CountingDisk(Disk):
    """Knows how many files were opened to be read."""

    opened = 0

    def open_to_read(self, path: AnyPath) -> int:
        self.opened += 1
        return super().open_to_read(path)


def state(root: Path) -> dict[str, tuple[int, int, int]]:
    found = {str(path): path.lstat() for path in [root, *root.rglob("*")]}
    return {
        name: (each.st_mtime_ns, each.st_ctime_ns, each.st_size) for name, each in found.items()
    }


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder that an engine has filled and left."""
    engine = Engine(tmp_path / "kv")
    assert engine.put(make_keys(6)) == make_keys(6)
    engine.close()
    return tmp_path / "kv"


def test_what_engines_left_is_served_and_nothing_is_changed(image: Path) -> None:
    before = state(image)
    guest = Guest(image)
    assert guest.read(make_keys(8)) == make_keys(6)
    assert guest.put(make_keys(1, start=50)) == []
    guest.tier.touch(make_keys(6))
    guest.tier.forget(make_keys(1))
    guest.tier.tick()
    assert guest.hits(make_keys(6)) == make_keys(6)[1:]
    guest.tier.clear()
    guest.tier.flush()
    guest.close()
    assert state(image) == before


def test_a_handler_stores_nothing_there(image: Path) -> None:
    guest = Guest(image)
    (key,) = make_keys(1)
    guest.hits([key])
    spec = guest.tier.prepare_load([key])
    assert guest.handler.store(spec, [key], [sealed(key, NAMESPACE)]) == [Outcome.DROPPED]
    guest.close()


@pytest.mark.parametrize("refused", [False, True])
def test_files_are_opened_to_be_read_and_around_the_page_cache_if_that_can_be_had(
    image: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    call = fcntl.fcntl

    def without_direct_io(fd: int, what: int, value: int = 0) -> int:
        if refused and what == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "this file system cannot")
        return call(fd, what, value)

    monkeypatch.setattr(fcntl, "fcntl", without_direct_io)
    before = open_files()
    guest = Guest(image)
    assert guest.read(make_keys(6)) == make_keys(6)
    slabs = guest.handler._slabs._slabs.values()
    assert slabs
    for fd in [fd for slab in slabs for fd in (slab.table_fd, slab.data_fd)]:
        assert call(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    direct = [bool(call(slab.data_fd, fcntl.F_GETFL) & os.O_DIRECT) for slab in slabs]
    assert direct == [not refused] * len(direct)
    guest.close()
    assert open_files() == before


def test_beside_somebody_who_writes(tmp_path: Path) -> None:
    """As through a mount of a folder that is written to outside."""
    program = (
        "engine = Engine(Path(sys.argv[1]), blocks=8); engine.put(make_keys(6))\n"
        "print('stored', flush=True); sys.stdin.readline()\n"
        "engine.put(make_keys(8, start=100)); print('replaced', flush=True); sys.stdin.readline()"
    )
    with child(program, tmp_path / "kv") as writer:
        expect(writer, "stored")
        guest = Guest(tmp_path / "kv")
        assert guest.read(make_keys(6)) == make_keys(6)
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
        expect(writer, "replaced")
        new = make_keys(8, start=100)
        assert guest.read(new) == new
        assert guest.hits(make_keys(6)) == []
        guest.close()


@pytest.mark.parametrize("seconds", [-3600, 3600], ids=["old", "by a clock that was ahead"])
def test_tables_that_nobody_changes_are_read_once(image: Path, seconds: int) -> None:
    for table in image.glob("*/*.table"):
        os.utime(table, (time.time() + seconds,) * 2)
    guest = Guest(image)
    assert guest.hits(make_keys(6)) == make_keys(6)
    calls = CountingDisk()
    guest.keeper.folder.disk = calls
    assert guest.hits(make_keys(6)) == make_keys(6)
    assert calls.opened == 0
    guest.close()


def test_a_folder_without_the_model_says_what_it_has(
    image: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        guest = Guest(image, OTHER)
    assert guest.hits(make_keys(6)) == []
    assert "nothing of this model" in caplog.text
    guest.close()


def test_what_comes_later_and_what_goes(image: Path, tmp_path: Path) -> None:
    there = tmp_path / "mount"
    there.mkdir()
    guest = Guest(there)
    assert guest.hits(make_keys(6)) == []
    for path in image.iterdir():
        shutil.copytree(path, there / path.name) if path.is_dir() else None
    assert guest.read(make_keys(6)) == make_keys(6)
    shutil.rmtree(there / NAMESPACE.id)
    assert guest.hits(make_keys(6)) == []
    guest.close()


def test_a_folder_that_is_written_to_is_opened_as_ever(tmp_path: Path) -> None:
    settings = NvmeSettings(
        path=str(tmp_path), capacity=Capacity(ByteSize(1 << 24)), write=WritePolicy.NEVER
    )
    tier = BACKEND.open_tier(settings, TierContext(NAMESPACE))
    assert tier.in_files
    assert BACKEND.folder(settings) == tmp_path
    tier.close()
    assert (tmp_path / "lock").exists()


def test_no_worker_is_sent_to_files_that_may_only_be_read(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUDirect Storage opens them to write, too, and is tried by writing a file."""
    settings = NvmeSettings(
        path=str(image), capacity=Capacity(ByteSize(1 << 24)), write=WritePolicy.NEVER
    )
    before = state(image)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    tier = BACKEND.open_tier(settings, TierContext(NAMESPACE))
    assert not tier.in_files
    assert BACKEND.folder(settings) is None
    tier.close()
    assert state(image) == before


def test_blocks_that_may_not_be_read_are_named(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(MediumError, match="no right to read"):
        Guest(image)
