"""Room from models that nobody serves at the moment, for one that somebody does.

The least recently used goes first. One that was used lately gives only what is beyond its share of
the folder: models that are served in turn do not cost each other all they have.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvtier.backends.nvme.folder.files import (
    DATA_SUFFIX,
    TABLE_SUFFIX,
    held,
    homes,
    is_empty,
    is_newer,
    length,
    marks,
    remove_bare_home,
    remove_slab,
    slab_files,
    used_at,
    used_bytes,
)
from kvtier.backends.nvme.folder.retaining_slabs import retaining
from kvtier.system.disk import Disk

_HOLD_S = 2.0
"""Others wait for the folder's lock meanwhile, ten seconds at most: what is left goes next time."""


class IdleHome(msgspec.Struct, frozen=True):
    """A namespace without a live owner."""

    path: Path
    tables: list[Path]
    """Those that may go: what is empty first, what holds something retained last, and of others
    the least recently used before."""
    used: float
    bytes: int


def reclaim(root: Path, mine: Path, capacity: int, wanted: int, keep_s: float, disk: Disk) -> bool:
    """Under the folder's lock: remove slabs of idle namespaces until so much of the capacity is
    free, or others have waited long enough; says whether anything was removed.

    Who was used within `keep_s` keeps a fair share of the capacity.
    """
    idle, living = _others(root, mine)
    now = time.time()  # which may have been ahead when they were used
    recent = {home.path: home.bytes for home in idle if abs(now - home.used) <= keep_s}
    share = fair_share(capacity, list(recent.values()), 1 + living)
    used = used_bytes(root)  # looked at once: thousands of slabs may have to go
    removed, end = False, time.monotonic() + _HOLD_S
    for home in sorted(idle, key=lambda each: each.used):
        left = home.bytes
        for table in home.tables:
            enough = used <= capacity - wanted or (removed and time.monotonic() > end)
            if enough or (home.path in recent and left <= share):
                break
            size = _bytes(table)
            with contextlib.suppress(OSError):  # a folder of that name, say, must stop nothing else
                remove_slab(disk, table)
                left -= size
                used -= size
                removed = True
        if not slab_files(home.path, TABLE_SUFFIX):
            remove_bare_home(home.path)
    return removed


def fair_share(capacity: int, idle: Sequence[int], living: int) -> int:
    """The most that any of them may have if who needs less leaves the rest to the others: idle
    ones need what they have, and living ones all they can get."""
    claims = living + len(idle)
    for size in sorted(idle):
        if size > capacity // claims:
            break
        capacity -= size
        claims -= 1
    return capacity // claims


def _bytes(table: Path) -> int:
    return length(table) + length(table.with_suffix(DATA_SUFFIX))


def _others(root: Path, mine: Path) -> tuple[list[IdleHome], int]:
    """The other namespaces that nobody serves, and how many somebody does."""
    idle: list[IdleHome] = []
    living = 0
    for path in homes(root):
        described = os.path.isfile(path / "namespace.json")  # noqa: PTH113 - never raises
        if path == mine or not described:
            continue
        if any(held(owner) for owner in marks(path)):
            living += 1
            continue
        tables = slab_files(path, TABLE_SUFFIX)
        used = {table: used_at(table) for table in tables}
        ours = [table for table in tables if not is_newer(table)]
        kept = retaining(path, ours)
        ours.sort(key=lambda table: (not is_empty(table), table in kept, used[table], table))
        size = sum(map(_bytes, tables))
        idle.append(IdleHome(path, ours, max(used.values(), default=0.0), size))
    return idle, living
