"""The names in an NVMe folder, the marks that keep owners alive, and how large things are."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

DATA_SUFFIX = ".slab"
TABLE_SUFFIX = ".table"


def owner_path(owners: Path, owner: int) -> Path:
    """The file whose lock keeps an owner alive."""
    return owners / f"{owner:08x}"


def hold_owner(owners: Path, owner: int) -> int:
    """Act for an owner: its slabs are not adopted while the descriptor returned is open."""
    fd = os.open(owner_path(owners, owner), os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def used_bytes(root: Path) -> int:
    """Bytes of all files below the folder: what counts against the capacity."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118
    return total


def held(path: Path) -> bool:
    """Whether some process holds the lock of an owner's file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def used_at(table: Path) -> float:
    """When a block of a slab was stored or used last: both write to its table."""
    try:
        return table.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def length(path: Path) -> int:
    """The bytes of a file; 0 if it has just gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
