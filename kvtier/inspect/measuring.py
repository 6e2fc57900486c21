"""Places beside a tier in which its medium is measured, and what is left of them by the killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kvtier import amounts
from kvtier.errors import MediumError
from kvtier.inspect.contents import Garbage, size_below, standing
from kvtier.system import memory as memory_limits
from kvtier.system.disk import Disk, lock_within

BENCH_MARK = ".kvtier-bench-"
"""How the names of the folders begin that measuring makes, and removes."""
_BENCH_S = 600.0
"""Measuring claims its folder within this time; younger ones may be about to."""


def with_slack(room: int) -> int:
    """The capacity of a tier in which so much is to fit."""
    return room + room // 8


@contextmanager
def folder_beside(home: Path, room: int, kept: int = 0) -> Iterator[Path]:
    """An empty folder on the disk of a tier's own, outside of what counts against its budget; gone
    afterwards. `kept` is to stay free there."""
    near = standing(home)
    beside = home.parent
    if near.stat().st_dev != beside.stat().st_dev or not os.access(beside, os.W_OK | os.X_OK):
        beside = near  # it is the root of a disk, or nothing may be written beside it
    refuse_without_room(beside, with_slack(room), kept)
    folder = Path(tempfile.mkdtemp(prefix=f"{BENCH_MARK}{os.getpid()}-", dir=beside))
    try:
        with holding(folder):  # for as long as it is held, `gc` leaves it alone
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_without_room(folder: Path, wanted: int, kept: int = 0) -> None:
    """Opening the tier would refuse, too, but speak of a capacity that the user never wrote."""
    free = Disk().free_bytes(folder) - kept
    in_memory = memory_limits.in_memory(folder)
    if in_memory and (left := memory_limits.memory_left()) is not None:
        free = min(free, left)  # a container may have less
    if free < wanted:
        raise MediumError(
            f"{folder} has too little free room to measure with {amounts.size(wanted)}: free some, "
            "or measure with fewer blocks (bench --blocks) or not at all (--no-measure)"
        )


def left_behind(root: Path) -> Iterator[Garbage]:
    """What measurements that were killed left in a tier's folder or beside it."""
    for folder in {root, root.parent}:
        for path in sorted(folder.glob(f"{BENCH_MARK}*")):
            with suppress(FileNotFoundError):  # it has just ended
                if not _lives(path):
                    what = "folder of a measurement that was killed"
                    yield Garbage(what, str(path), size_below(path), partial(_remove, path))


def _lives(path: Path) -> bool:
    young = time.time() - path.stat().st_mtime < _BENCH_S
    return young or folder_held(path)


def _remove(path: Path) -> bool:
    with suppress(FileNotFoundError):  # somebody else has just removed it
        if _lives(path):
            return False
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Let others see that somebody works in a folder, whatever it is for."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def folder_held(folder: Path) -> bool:
    """Whether a live process is `holding` it; another user's, or no folder, counts as held."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (PermissionError, NotADirectoryError):
        return True
    try:
        return not lock_within(fd, fcntl.LOCK_EX, 0.0)
    finally:
        os.close(fd)
