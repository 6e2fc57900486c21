"""Listing a folder of objects in the order of their full names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.backends.object.stores.errors import check_deadline, map_os_errors
from kvtier.backends.object.stores.store import ObjectInfo, is_name

_SCANS_MAX = 8


class _Entry(NamedTuple):
    name: str
    """The full name; that of a folder ends with a slash."""
    status: os.stat_result | None
    """None for a folder."""


def object_info(name: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, status.st_size, status.st_mtime)


def may_hold_names(folder: str) -> bool:
    """Whether an object may lie in this folder. Folders of others may be deeper than any name."""
    return is_name(f"{folder}x")


def walk(
    root: str, folder: str, prefix: str, after: str, deadline: float | None
) -> Iterator[ObjectInfo]:
    """The objects in and below a folder, depth first. A folder is sorted by its name and a slash,
    which gives the order of the full names."""
    check_deadline(deadline, folder)
    for name, status in _scan(root, folder):
        if status is None:
            relevant = name.startswith(prefix) and may_hold_names(name)
            if relevant and (name > after or after.startswith(name)):
                yield from walk(root, name, prefix, after, deadline)
        elif name.startswith(prefix) and name > after and is_name(name):
            yield object_info(name, status)


def _scan(root: str, folder: str) -> Sequence[_Entry]:
    """The entries of one folder, in order.

    An entry that vanishes during a scan may have been replaced by one that the scan has not seen.
    So the folder is scanned again until nothing vanishes, a limited number of times.
    """
    path = os.path.join(root, folder)
    found: list[_Entry | None] = []
    for _ in range(_SCANS_MAX):
        found = []
        with map_os_errors(path):
            try:
                found.extend(_entries(path, folder))
            except NotADirectoryError:
                return []
            except FileNotFoundError:  # the folder itself
                if os.path.isdir(path):
                    continue
        if None not in found:
            break
    return sorted(filter(None, found), key=lambda one: one.name)


def _entries(path: str, folder: str) -> Iterator[_Entry | None]:
    """The entries of one folder; None for one that vanishes."""
    with os.scandir(path) as entries:
        for entry in entries:
            if not is_name(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield _Entry(f"{folder}{entry.name}/", None)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                yield None
                continue
            if stat.S_ISREG(status.st_mode):
                yield _Entry(folder + entry.name, status)
