"""Holding a region that nobody uses, so that it can be mended or removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.backends.cpu.region_locks import list_path, lock_owner, unlock
from kvtier.errors import MediumInUse
from kvtier.system.disk import lock_within


@contextlib.contextmanager
def region_held(path: Path) -> Iterator[None]:
    """Be the owner of a CPU region that nobody maps; raises MediumInUse if somebody does."""
    used = MediumInUse(f"{path} is in use: stop its engine first")
    try:
        owner = lock_owner(path)
    except MediumInUse:
        raise used from None
    with contextlib.ExitStack() as held:
        held.callback(unlock, owner)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # somebody else has just removed it, and needs no lock
            path.with_suffix(".owner").unlink(missing_ok=True)
            raise
        held.callback(os.close, fd)
        if not lock_within(fd, fcntl.LOCK_EX, 0.0):
            raise used
        yield


def remove_region(path: Path, still: Callable[[], bool] = lambda: True) -> None:
    """Delete a CPU region, if it is there and still is to be; raises MediumInUse if somebody maps
    it."""
    with contextlib.suppress(FileNotFoundError), region_held(path):
        if still():
            path.unlink(missing_ok=True)
            list_path(path).unlink(missing_ok=True)
            path.with_suffix(".owner").unlink(missing_ok=True)
