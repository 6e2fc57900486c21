"""The names in an NVMe folder, the marks that keep owners alive, and how large things are."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path

from kvtier.core.disk import Disk, is_locked, lock_within
from kvtier.core.slab.layout import ENTRY_BYTES, TABLE_AT, SlabHeader
from kvtier.errors import FormatError, NewerFormat

DATA_SUFFIX = ".slab"
TABLE_SUFFIX = ".table"
_HOLD_S = 0.1
"""Who asks whether an owner is `held` holds it himself for a moment."""
_PIECE_BYTES = 1 << 16
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
_HOME = re.compile(r"[0-9a-f]{32}")
_WHOLE = re.compile(r"[0-9a-f]{8}\.(slab|table)")
_UNFINISHED = re.compile(
    r"(namespace|[0-9a-f]{8})\.(?P<maker>[0-9a-f]{8})(\.(data|table))?\.making"
)


def homes(root: Path) -> list[Path]:
    """The folders of namespaces. What else lies in the root is somebody else's."""
    named = [path for path in root.iterdir() if _HOME.fullmatch(path.name)]
    return [path for path in named if path.is_dir() and not path.is_symlink()]


def slab_files(home: Path, suffix: str) -> list[Path]:
    """The data or the table files of a namespace's slabs."""
    return [path for path in home.glob(f"*{suffix}") if _WHOLE.fullmatch(path.name)]


def whole(home: Path) -> set[str]:
    """The slabs of which both files are there, by the digits that name them."""
    named: dict[str, set[str]] = {DATA_SUFFIX: set(), TABLE_SUFFIX: set()}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        for name in os.listdir(home):  # noqa: PTH208 - of many thousands, again and again
            if _WHOLE.fullmatch(name):
                digits, dot, suffix = name.partition(".")
                named[dot + suffix].add(digits)
    return named[DATA_SUFFIX] & named[TABLE_SUFFIX]


def halves(home: Path) -> list[Path]:
    """Files of slabs whose other file is missing, which serve nobody; who removes one has the
    folder's lock. By name: one that cannot be looked at is there, too."""
    both = whole(home)
    tables = [path for path in slab_files(home, TABLE_SUFFIX) if path.stem not in both]
    data = [path for path in slab_files(home, DATA_SUFFIX) if path.stem not in both]
    return data + [table for table in tables if not is_newer(table)]


def unfinished(home: Path) -> list[tuple[Path, Path]]:
    """Files that are being made, or were when their makers died, each with its maker's mark."""
    found = [(path, _UNFINISHED.fullmatch(path.name)) for path in home.iterdir()]
    return [(path, home / "owners" / match["maker"]) for path, match in found if match]


def owner_path(owners: Path, owner: int) -> Path:
    """The file whose lock keeps an owner alive."""
    return owners / f"{owner:08x}"


def hold_owner(owners: Path, owner: int) -> int:
    """Act for an owner: its slabs are not adopted while the descriptor returned is open."""
    path = owner_path(owners, owner)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not lock_within(fd, fcntl.LOCK_SH, _HOLD_S):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process keeps it locked")
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "its mark was taken away", str(path))
    except OSError:
        os.close(fd)
        raise
    return fd


def let_go(owners: Path, owner: int, fd: int) -> None:
    """Act for an owner no more: who is the last to do so takes its mark away."""
    with contextlib.suppress(OSError):  # somebody else still acts for it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner_path(owners, owner).unlink()
    os.close(fd)


def take_away(disk: Disk, path: Path) -> bool:
    """Remove rubbish, if that can be done: a folder of that name, say, must stop nothing else."""
    with contextlib.suppress(OSError):
        disk.unlink(path)
        return True
    return False


def remove_slab(disk: Disk, table: Path) -> None:
    """Delete a slab; whoever has it open finds it empty, so that its room is free at once."""
    data = table.with_suffix(DATA_SUFFIX)
    disk.unlink(table)
    with contextlib.suppress(OSError):
        os.truncate(data, 0)
    disk.unlink(data)


def remove_bare_home(path: Path) -> None:
    """Remove what a namespace has beside its slabs, which have gone, and its folder."""
    shutil.rmtree(path / "owners", ignore_errors=True)
    (path / "namespace.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # what else lies there is not ours
        path.rmdir()


def used_bytes(root: Path) -> int:
    """Bytes of all files below the folder: what counts against the capacity. One that cannot be
    looked at counts nothing, here as below: it must not keep slabs from being made."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
    return total


def held(path: Path) -> bool:
    """Whether some process holds the lock of an owner's file. What is no file has no owner; what
    cannot be asked after (too many files are open, say) may well have one."""
    try:
        return is_locked(path)
    except OSError as error:
        return error.errno not in _NO_FILE


def used_at(table: Path) -> float:
    """When a block of a slab was stored or used last: both write to its table."""
    try:
        return table.stat().st_mtime
    except OSError:
        return 0.0


def length(path: Path) -> int:
    """The bytes of a file; 0 if it has just gone, or cannot be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_empty(table: Path) -> bool:
    """Whether no slot of a slab holds anything; of one in use the beginning says that it does."""
    try:
        fd = os.open(table, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        at = TABLE_AT
        while entries := os.pread(fd, _PIECE_BYTES, at):
            if any(entries[::ENTRY_BYTES]):
                return False
            at += len(entries)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def is_newer(table: Path) -> bool:
    """Whether a newer kvtier wrote a slab: it is left alone."""
    try:
        fd = os.open(table, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            SlabHeader.unpack(os.pread(fd, TABLE_AT, 0))
        finally:
            os.close(fd)
    except NewerFormat:
        return True
    except (FormatError, OSError):
        return False
    return False
