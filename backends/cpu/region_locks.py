"""Who owns a region, and who maps it: two file locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvtier.errors import MediumInUse
from kvtier.system.disk import is_locked, lock_within

SUFFIX = ".region"
LIST_SUFFIX = ".retained"


OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
"""All users share /dev/shm, and may lay a link there that leads anywhere."""


LOCK_TRY_S = 0.2
"""How long to try for a lock: who only asks whether it is held takes it for a moment."""


def owner_path(path: Path) -> Path:
    return path.with_suffix(".owner")


def list_path(path: Path) -> Path:
    """The file beside a region that says what is retained in it."""
    return path.with_suffix(LIST_SUFFIX)


def lock_owner(path: Path) -> int:
    """Be the owner of a region, be it there or not, until `unlock`; raises MediumInUse if somebody
    else is, and OSError."""
    owner = owner_path(path)
    while True:
        fd = os.open(owner, OPEN_FLAGS | os.O_CREAT, 0o600)
        if not lock_within(fd, fcntl.LOCK_EX, LOCK_TRY_S):
            os.close(fd)
            raise MediumInUse(
                f"the CPU region {path} is in use by another engine: give each engine its own name"
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), owner.stat()):
                return fd
        os.close(fd)  # it was removed before it was locked


def unlock(owner: int) -> None:
    """By word, because a child that was forked off has the file open, too, as long as it lives."""
    fcntl.flock(owner, fcntl.LOCK_UN)
    os.close(owner)


def in_use(path: Path) -> bool:
    """Whether any live process owns or maps the region."""
    return is_held(path) or is_held(owner_path(path))


def is_held(path: Path) -> bool:
    """Whether a lock is held; one that cannot be tried may be."""
    try:
        return is_locked(path)
    except OSError:
        return True
