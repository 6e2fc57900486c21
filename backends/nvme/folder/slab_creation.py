"""New slabs: planned under the folder's lock, filled without it, and visible only when whole."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from kvtier.backends.nvme.folder.files import (
    halves,
    held,
    homes,
    marks,
    take_away,
    unfinished,
    used_bytes,
)
from kvtier.backends.nvme.folder.folder import MAKING_SUFFIX, NO_ROOM, NvmeFolder
from kvtier.backends.nvme.folder.limits import Limits
from kvtier.backends.nvme.folder.lock import FolderBusy
from kvtier.backends.nvme.folder.slab_file import SlabFile, file_sizes
from kvtier.core.slab.layout import (
    ENTRY_BYTES,
    FLAG_DISCARD,
    OWNER,
    OWNER_AT,
    SLOTS_MAX,
    TABLE_AT,
    SlabHeader,
)


def create_slab(folder: NvmeFolder, owner: int, slots_max: int, limits: Limits) -> SlabFile | None:
    """A new empty slab within the budget and above the floor; None if there is no room."""
    with folder.locked():
        header = _plan_slab(folder, slots_max, limits)
        if header is None:
            return None
        making = _making(folder, header.slab_id, owner)
        try:
            folder.describe()
            fds = _begin(folder, making, header)
        except OSError as error:
            _give_up(folder, making, error)
            return None
    final = (folder.data_path(header.slab_id), folder.table_path(header.slab_id))
    try:
        _fill(folder, fds, header, owner)
        with folder.locked():
            for source, target in zip(making, final, strict=True):
                source.rename(target)
    except (OSError, FolderBusy) as error:
        _give_up(folder, (*making, *final), error)
        return None
    return SlabFile(header, owner)


def _plan_slab(folder: NvmeFolder, slots_max: int, limits: Limits) -> SlabHeader | None:
    """Under the lock: the largest slab that there is room for."""
    _sweep(folder)
    slots = _slots_at_most(folder, slots_max, limits)
    if slots < slots_max and folder.reclaim(limits, limits.slab_bytes):
        slots = _slots_at_most(folder, slots_max, limits)
    if slots < 1:
        return None
    return SlabHeader(
        slots=slots,
        slot_bytes=limits.slot_bytes,
        data_at=0,
        slab_id=_new_id(folder),
        namespace=folder.namespace.digest,
        flags=FLAG_DISCARD if limits.discard else 0,
    )


def _slots_at_most(folder: NvmeFolder, slots_max: int, limits: Limits) -> int:
    used = used_bytes(folder.root)
    room = folder.bound(limits, used) - used
    fitting = max(0, room - TABLE_AT) // (limits.slot_bytes + ENTRY_BYTES)
    return min(slots_max, fitting, SLOTS_MAX)


def _making(folder: NvmeFolder, slab_id: int, owner: int) -> tuple[Path, Path]:
    """Data and table of a slab that is not whole yet; the maker's mark lets others clean up."""
    stem = f"{slab_id:08x}.{owner:08x}"
    return folder.home / f"{stem}.data{MAKING_SUFFIX}", folder.home / f"{stem}.table{MAKING_SUFFIX}"


def _begin(folder: NvmeFolder, making: tuple[Path, Path], header: SlabHeader) -> list[int]:
    """Under the lock: files of full length, which count against the budget at once."""
    fds: list[int] = []
    try:
        for path, size in zip(making, file_sizes(header), strict=True):
            fds.append(folder.disk.open(path, create=True))
            os.ftruncate(fds[-1], size)
    except OSError:
        for fd in fds:
            folder.disk.close(fd)
        raise
    return fds


def _fill(folder: NvmeFolder, fds: list[int], header: SlabHeader, owner: int) -> None:
    """Take the room, and write the header; others need not wait for that."""
    page = bytearray(header.pack().ljust(TABLE_AT, b"\0"))
    OWNER.pack_into(page, OWNER_AT, owner)
    try:
        for fd, size in zip(fds, file_sizes(header), strict=True):
            folder.disk.allocate(fd, size)
        if folder.disk.writev(fds[1], [memoryview(page)], 0) != len(page):
            raise OSError(errno.EIO, "a slab's header was written in part")
    finally:
        for fd in fds:
            folder.disk.close(fd)


def _give_up(folder: NvmeFolder, paths: Sequence[Path], error: OSError | FolderBusy) -> None:
    """Leave nothing of a slab that cannot be made; only the lack of room is no error."""
    for path in paths:
        folder.disk.unlink(path)
    if not isinstance(error, OSError) or error.errno not in NO_ROOM:
        raise error


def _new_id(folder: NvmeFolder) -> int:
    while True:
        slab_id = secrets.randbits(32)
        if not folder.table_path(slab_id).exists() and not folder.data_path(slab_id).exists():
            return slab_id


def _sweep(folder: NvmeFolder) -> None:
    """Under the lock: remove what the dead left half made, and their files."""
    for home in homes(folder.root):
        for path in marks(home):
            if not held(path):
                take_away(folder.disk, path)
        for path, maker in unfinished(home):
            if not held(maker):
                take_away(folder.disk, path)
        for path in halves(home):
            take_away(folder.disk, path)
