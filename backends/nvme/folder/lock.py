"""The one lock of an NVMe folder, for what concerns several processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.errors import MediumError
from kvtier.system.disk import lock_within

_WAIT_S = 10.0


class FolderBusy(MediumError):
    """Another process holds the folder's lock for too long."""


@contextlib.contextmanager
def folder_locked(root: Path) -> Iterator[None]:
    """Hold the lock under which a folder's slabs change hands; raises FolderBusy rather than wait
    without end."""
    path, end = root / "lock", time.monotonic() + _WAIT_S
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            if not lock_within(fd, fcntl.LOCK_EX, end - time.monotonic()):
                raise FolderBusy(
                    f"{root} is locked by a process that hangs: `fuser -v {path}` names those that "
                    "have it open; end the one that hangs"
                )
            if has_name(fd, path):  # else somebody has removed it: others take another by now
                yield
                return
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that is just being started has it open, too
            os.close(fd)


def has_name(fd: int, path: Path) -> bool:
    """Whether this is still the file of that name; raises OSError if it cannot be looked at."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
