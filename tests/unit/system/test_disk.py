"""The seam to the file system: which system calls it makes, and what it lets pass."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.tiers.nvme_rig import open_files

from kvtier.system.disk import Disk, is_locked, lock_within, mounted, read_all, write_all

DISK = Disk()


def test_files_are_made_once_private_and_closed_on_exec(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = DISK.open(path, create=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    DISK.close(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    with pytest.raises(FileExistsError):
        DISK.open(path, create=True)
    fd = DISK.open_to_read(path)
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    DISK.close(fd)


@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_is_gone_around_if_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "open", lambda path, flags, mode: asked.append(flags))
    DISK.open("file", direct=direct)
    assert [bool(flags & os.O_DIRECT) for flags in asked] == [direct]


@pytest.mark.parametrize("open_", [DISK.open, DISK.open_to_read])
def test_links_are_not_followed(tmp_path: Path, open_: Callable[[Path], int]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError) as failure:
        open_(tmp_path / "link")
    assert failure.value.errno == errno.ELOOP


def test_nobody_waits_for_the_other_end_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    DISK.close(DISK.open_to_read(tmp_path / "pipe"))


@pytest.mark.parametrize(
    ("error", "passes"),
    [(errno.EOPNOTSUPP, True), (errno.EINVAL, True), (errno.ENOSPC, False), (errno.EIO, False)],
)
def test_where_room_cannot_be_taken_ahead_the_length_is_set_and_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, passes: bool
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    fd = DISK.open(tmp_path / "file", create=True)
    if passes:
        DISK.allocate(fd, 8192)
    else:
        with pytest.raises(OSError) as failure:
            DISK.allocate(fd, 8192)
        assert failure.value.errno == error
    assert os.fstat(fd).st_size == (8192 if passes else 0)
    DISK.close(fd)


@pytest.mark.parametrize("works", [True, False])
def test_names_are_synced_in_their_folder_which_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    synced: list[Path] = []

    def sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        if not works:
            raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fsync", sync)
    before = open_files()
    if works:
        DISK.sync_names(tmp_path)
    else:
        with pytest.raises(OSError, match="gone"):
            DISK.sync_names(tmp_path)
    assert synced == [tmp_path]
    assert open_files() == before


def test_what_is_written_in_many_calls_is_read_to_the_end_of_the_file(tmp_path: Path) -> None:
    pieces = [b"", *(bytes([index % 251]) * (index % 7) for index in range(2000))]
    fd = DISK.open(tmp_path / "file", create=True)
    write_all(DISK, fd, [memoryview(piece) for piece in pieces], 3)
    assert (tmp_path / "file").read_bytes() == bytes(3) + b"".join(pieces)
    into = [bytearray(len(piece)) for piece in [*pieces, b"behind it"]]
    assert read_all(DISK, fd, [memoryview(part) for part in into], 3) == sum(map(len, pieces))
    assert into == [*pieces, bytes(9)]
    DISK.close(fd)


def test_a_device_that_takes_nothing_is_not_asked_for_ever() -> None:
    class Stuck(Disk):
        def writev(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
            return 0

    with pytest.raises(OSError, match="takes no more"):
        write_all(Stuck(), 0, [memoryview(b"data")], 0)


def test_who_asks_for_a_lock_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path), "what is not there"
    path.touch()
    before = open_files()
    with path.open("rb") as holder:
        assert lock_within(holder.fileno(), fcntl.LOCK_SH, 0.0)
        assert is_locked(path)
        with path.open("rb") as other:
            assert lock_within(other.fileno(), fcntl.LOCK_SH, 0.0)
            assert not lock_within(other.fileno(), fcntl.LOCK_EX, 0.0)
    assert not is_locked(path)
    assert open_files() == before


@pytest.mark.parametrize("name", [b"with a blank", "données\u00a0".encode(), b"no\xfftext"])
def test_a_file_system_is_known_whatever_its_folder_is_called(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    written = os.fsencode(folder).replace(b" ", b"\\040")  # as the kernel does it
    listed = tmp_path / "proc/self/mounts"
    assert mounted(tmp_path, tmp_path) == ("unknown", [""])
    listed.parent.mkdir(parents=True)
    listed.write_bytes(b"/dev/a / ext4 rw 0 0\n/dev/b %s nfs4 rw,huge=never 0 0\n" % written)
    assert mounted(tmp_path, tmp_path) == ("ext4", ["rw"])
    assert mounted(folder / "below", tmp_path) == ("nfs4", ["rw", "huge=never"])
