"""Regions that nobody will come back to."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.backends.cpu.region import KEEP, KEEP_AT, MAKING_SUFFIX, read_header
from kvtier.backends.cpu.region_locks import (
    SUFFIX,
    in_use,
    is_held,
    list_path,
    lock_owner,
    owner_path,
    unlock,
)
from kvtier.errors import FormatError, MediumInUse, NewerFormat
from kvtier.slab.layout import FLAG_DISCARD


def regions(folder: Path) -> Iterator[Path]:
    """All of this user's regions in a folder."""
    yield from own_files(folder, f"kvtier-*{SUFFIX}")


def said_of_idle(folder: Path, own: Sequence[Path]) -> str:
    """Which regions but these nobody uses now, for those who miss their room. An engine that has
    got another name leaves one that no command of its stack removes, for `keep_for`."""
    with contextlib.suppress(OSError):
        idle = [str(each) for each in regions(folder) if each not in own and not in_use(each)]
        if idle:
            return f"; no engine uses {', '.join(idle)} now: remove what none will come back to"
    return ""


def own_files(folder: Path, pattern: str) -> Iterator[Path]:
    """This user's files with such names: whoever shares the folder may put others there."""
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                yield path


def leftovers(folder: Path, now: float) -> list[Path]:
    """Regions that nobody will attach to again: unused, and either meant to be discarded, damaged,
    or not attached for as long as their last owner said."""
    found = []
    for path in regions(folder):
        try:
            if in_use(path):
                continue
            with path.open("rb") as file:
                header = read_header(file.fileno())
                (keep_s,) = KEEP.unpack(os.pread(file.fileno(), KEEP.size, KEEP_AT))
            unused_s = abs(now - path.stat().st_mtime)  # a clock may have been ahead
            if header.flags & FLAG_DISCARD or unused_s > keep_s:
                found.append(path)
        except (NewerFormat, OSError):
            continue
        except FormatError:
            found.append(path)
    return found


def unfinished(folder: Path) -> list[Path]:
    """Regions whose makers died before they were there."""
    left = own_files(folder, f"kvtier-{os.getuid()}-*{MAKING_SUFFIX}")
    making = [path.with_suffix(SUFFIX) for path in left]
    return [path for path in making if not path.exists() and not in_use(path)]


def remove(path: Path) -> bool:
    """Delete a region and what lies beside it; False if somebody has begun to use it."""
    try:
        lock = lock_owner(path)
    except FileNotFoundError:  # not even its folder is there
        return True
    except (MediumInUse, OSError):
        return False
    try:
        if is_held(path):
            return False
        beside = (path.with_suffix(MAKING_SUFFIX), list_path(path), owner_path(path))
        for victim in (path, *beside):
            victim.unlink(missing_ok=True)
    finally:
        unlock(lock)
    return True
