"""The lock of an NVMe folder: one holder at a time, whatever becomes of its file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.tiers.nvme_rig import open_files

from kvtier.errors import MediumError
from kvtier.slab import files as lock
from kvtier.slab.files import FolderBusy, folder_locked
from kvtier.slab.folder import SlabFolder
from kvtier.system.disk import Disk, is_locked
from kvtier.testing.subject import NAMESPACE


def test_a_lock_whose_file_was_removed_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_WAIT_S", 0.0)
    one, other = (SlabFolder(tmp_path / "kv", NAMESPACE, Disk()) for _ in range(2))
    (tmp_path / "kv" / "lock").unlink()
    with one.locked(), pytest.raises(FolderBusy), other.locked():
        raise AssertionError("both have it")


@pytest.mark.parametrize("anew", [False, True])
def test_who_waited_for_a_lock_that_was_removed_meanwhile_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    path, within = tmp_path / "lock", lock.lock_within
    tried = 0

    def removed_meanwhile(fd: int, how: int, seconds: float) -> bool:
        nonlocal tried
        tried += 1
        if tried == 1:
            path.unlink()
            if anew:
                path.touch()
        return within(fd, how, seconds)

    monkeypatch.setattr(lock, "lock_within", removed_meanwhile)
    before = open_files()
    with folder_locked(tmp_path):
        assert is_locked(path)
    assert not is_locked(path)
    assert tried == 2
    assert open_files() == before


def test_a_child_that_begins_meanwhile_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is another program it has the file open, too."""
    monkeypatch.setattr(lock, "_WAIT_S", 0.0)
    read, write = os.pipe()
    with folder_locked(tmp_path):
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        with folder_locked(tmp_path):
            assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    """Who may write here would choose where others, root say, make a file."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "lock").symlink_to(tmp_path / "nologin")
    with pytest.raises(MediumError, match="symbolic links"):
        SlabFolder(tmp_path / "kv", NAMESPACE, Disk())
    assert not (tmp_path / "nologin").exists()
