"""The seam to the file system: all file calls of the tiers, and what is mounted where."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.record.record import Buffer, behind

AnyPath = str | os.PathLike[str]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_fallocate = ctypes.CDLL(None).fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_BUFFERS_MAX = 512
"""The system takes 1024 in one call."""
_LOOK_S = 0.002
"""How often a lock is tried that others hold: mostly for as long as it takes to rename a file."""


class Disk:
    """Plain system calls. Raises OSError as the system does; retries nothing. What is opened is no
    link: one may lead anywhere."""

    def open(self, path: AnyPath, *, create: bool = False, direct: bool = False) -> int:
        """Open for reading and writing, closed on exec, 0600 when created."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        if direct:
            flags |= os.O_DIRECT
        return os.open(path, flags, 0o600)

    def open_to_read(self, path: AnyPath) -> int:
        """Open for reading alone, closed on exec; does not wait for what is no ordinary file."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def readv(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        """Read into buffers at an offset; may return fewer bytes, 0 at the end of the file."""
        return os.preadv(fd, into, offset)

    def writev(self, fd: int, data: Sequence[Buffer], offset: int) -> int:
        """Write buffers at an offset; may write fewer bytes."""
        return os.pwritev(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        """Give a file its whole length and its room now, so that later writes cannot lack it."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, size)

    def empty(self, fd: int) -> None:
        """Give back the room of a file. It keeps its length where the system can: who has mapped it
        would die of reading behind its end."""
        size = os.fstat(fd).st_size
        if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, size):
            os.ftruncate(fd, 0)

    def sync(self, fd: int) -> None:
        """Wait until the file's data would survive a loss of power."""
        os.fdatasync(fd)

    def sync_names(self, folder: AnyPath) -> None:
        """Wait until the names in a folder would survive a loss of power: syncing a file does not
        save its name everywhere."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        """Give a file its final name at one instant, in place of what has that name."""
        os.replace(source, target)  # noqa: PTH105 - strings are paths, too

    def unlink(self, path: AnyPath) -> None:
        """Remove a file; one that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108

    def free_bytes(self, path: Path) -> int:
        """Room that an ordinary user may still take on the file system of `path`."""
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def total_bytes(self, path: Path) -> int:
        """Size of the file system of `path`."""
        info = os.statvfs(path)
        return info.f_blocks * info.f_frsize


def read_all(disk: Disk, fd: int, into: Sequence[Buffer], offset: int) -> int:
    """Fill these buffers, in as many reads as it takes; answers with the bytes that there were: if
    the file ends before, fewer than they hold."""
    start, rest = offset, behind(into, 0)
    while rest and (count := disk.readv(fd, rest[:_BUFFERS_MAX], offset)) > 0:
        offset += count
        rest = behind(rest, count)
    return offset - start


def write_all(disk: Disk, fd: int, data: Sequence[Buffer], offset: int) -> None:
    """Write all of these buffers, in as many writes as it takes."""
    rest = behind(data, 0)
    while rest:
        count = disk.writev(fd, rest[:_BUFFERS_MAX], offset)
        if count <= 0:
            raise OSError(errno.EIO, "the device takes no more")
        offset += count
        rest = behind(rest, count)


def read_bounded(path: Path, most: int) -> bytes:
    """All of a file, or of a pipe or a device, that a person names; raises OSError if it has more
    than so many bytes."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def is_locked(path: Path) -> bool:
    """Whether a live process holds a lock on this file; raises OSError if it cannot be tried."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return not lock_within(fd, fcntl.LOCK_EX, 0.0)
    finally:
        os.close(fd)


def lock_within(fd: int, how: int, seconds: float) -> bool:
    """Lock a file (`how` is one of flock's ways), if that can be had within so many seconds: it is
    tried once at least."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_S)


# What kind of file system a folder is on, by what the system says is mounted where.

_OCTAL = re.compile(rb"\\([0-7]{3})")
"""A blank in a name, say, as the kernel writes it there."""


def mounted(folder: Path, root: Path = Path("/")) -> tuple[str, list[str]]:
    """The kind of the file system that a folder is on, and its options; `unknown` if the system
    does not say."""
    real = os.fsencode(folder.resolve())
    best, kind, options = b"", b"unknown", b""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/mounts").read_bytes().split(b"\n")[:-1]:
            words = line.split(b" ")
            point = _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), words[1])
            inside = real == point or real.startswith(point.rstrip(b"/") + b"/")
            if inside and len(point) >= len(best):
                best, kind, options = point, words[2], words[3]
    return os.fsdecode(kind), os.fsdecode(options).split(",")
