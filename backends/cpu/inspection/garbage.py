"""What lies in a CPU tier's folder that no engine will come back to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from kvtier.backends.cpu.leftover_regions import leftovers, own_files, remove
from kvtier.backends.cpu.region_locks import LIST_SUFFIX, SUFFIX, in_use
from kvtier.inspect.contents import Garbage, of_file

_MAKING = ".making"


def find_garbage(folder: Path, regions: Sequence[Path], idle_s: float | None) -> Iterator[Garbage]:
    """All regions that nobody will come back to; of these, which are the stack's, also those that
    are idle for so long: others lie beside them, and were not asked about."""
    left = leftovers(folder, time.time())
    for path in left:
        what = "region that nobody will come back to"
        yield from of_file(what, path, partial(_remove_left, folder, path))
    for path in regions:
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            if path not in left and _idle(path, idle_s):
                what = "region that nobody used for so long"
                yield from of_file(what, path, partial(_remove_idle, path, idle_s))
    for path in own_files(folder, f"kvtier-{os.getuid()}-*{_MAKING}"):
        yield from _unless_used(path, "region that was never finished")
    beside = ((".owner", "lock"), (LIST_SUFFIX, "list of retained blocks"))
    for suffix, what in beside:
        for path in own_files(folder, f"kvtier-{os.getuid()}-*{suffix}"):
            if not path.with_suffix(SUFFIX).exists():
                yield from _unless_used(path, f"{what} without its region")


def _remove_left(folder: Path, path: Path) -> bool:
    return path in leftovers(folder, time.time()) and remove(path)


def _idle(path: Path, idle_s: float | None) -> bool:
    if idle_s is None or in_use(path):
        return False
    return time.time() - path.stat().st_mtime > idle_s


def _remove_idle(path: Path, idle_s: float | None) -> bool:
    try:
        return _idle(path, idle_s) and remove(path)
    except FileNotFoundError:  # as is who removes it just now
        return True


def _unless_used(path: Path, what: str) -> Iterator[Garbage]:
    region = path.with_suffix(SUFFIX)

    def remove_file() -> bool:
        if not region.exists():  # under the owner's lock: an engine may be about to make it
            return remove(region)
        if path.suffix != _MAKING or in_use(region):
            return False
        path.unlink(missing_ok=True)
        return True

    if not in_use(region):
        yield from of_file(what, path, remove_file)
