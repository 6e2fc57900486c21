"""Holding what nobody uses of a folder, so that it can be mended or removed, or filled alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.backends.nvme.folder.files import is_empty, is_newer, let_go, marks, remove_slab
from kvtier.backends.nvme.folder.folder import NvmeFolder
from kvtier.backends.nvme.folder.lock import folder_locked
from kvtier.core.slab.layout import OWNER, OWNER_AT
from kvtier.errors import MediumInUse
from kvtier.system.disk import Disk, is_locked, lock_within
from kvtier.types import Namespace

_LOOK_S = 0.2
_STOPPED_S = 10.0
"""A command that was stopped so long ago (by Ctrl-Z, say) is not about to go on."""


def has_live_owner(home: Path) -> bool:
    """Whether a process acts for any owner of this namespace's folder."""
    return any(is_locked(path) for path in marks(home))


def has_owner_now(table: Path) -> bool:
    """Whether a process acts for a slab's owner. Asked under the folder's lock: an engine that came
    since the slab was looked at may have taken it over."""
    try:
        with table.open("rb", buffering=0) as file:
            (owner,) = OWNER.unpack(os.pread(file.fileno(), OWNER.size, OWNER_AT))
    except FileNotFoundError:
        return False
    except struct.error:  # too short to have one
        return has_live_owner(table.parent)
    return is_locked(table.parent / "owners" / f"{owner:08x}")


@contextlib.contextmanager
def slab_held(table: Path) -> Iterator[None]:
    """Keep engines from taking a slab over; raises MediumInUse if one has it."""
    with folder_locked(table.parent.parent):
        if has_owner_now(table):
            raise MediumInUse(f"{table} is in use: stop its engine first")
        yield


def remove_broken_slab(table: Path, still_broken: Callable[[], bool]) -> None:
    """Remove a slab of which nobody knows the owner; raises MediumInUse if anybody may be it."""
    home = table.parent
    with folder_locked(home.parent):
        if has_live_owner(home):
            raise MediumInUse(f"{table} is broken, and {home} is in use: stop its engines first")
        if still_broken():
            remove_slab(Disk(), table)


@contextlib.contextmanager
def filling_alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Be the only command that fills an NVMe folder: of two at once each would store, in slabs of
    its own, what the other has on its way. `waits` is called if there is another."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # opening the tier says what is wrong
            folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, fd)
            if not lock_within(fd, fcntl.LOCK_EX, 0.0):
                waits()
                _wait_for(fd, folder)
        yield


def _wait_for(fd: int, folder: Path) -> None:
    """Lock a folder as soon as the command has ended that fills it, however long that takes; raises
    MediumInUse if that command is stopped, because it would be for ever."""
    since: float | None = None
    while not lock_within(fd, fcntl.LOCK_EX, 0.0):
        stopped = _stopped_holder(fd)
        since = None if stopped is None else since or time.monotonic()
        if since is not None and time.monotonic() - since >= _STOPPED_S:
            raise MediumInUse(
                f"{folder} is being filled by process {stopped}, which is stopped: let it go on "
                f"(kill -CONT {stopped}), or end it"
            )
        time.sleep(_LOOK_S)


def _stopped_holder(fd: int) -> int | None:
    """The process that has locked this file, if the system tells and the process is stopped."""
    inode = os.fstat(fd).st_ino
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE 4711 fe:00:2531371 0 EOF
            _, kind, _, how, pid, place, *_ = line.split()
            if (kind, how) == ("FLOCK", "WRITE") and place.endswith(f":{inode}"):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
                return int(pid) if state in "Tt" else None
    return None


@contextlib.contextmanager
def sparing(root: Path, namespace: Namespace) -> Iterator[None]:
    """Meanwhile a namespace that was copied into an NVMe folder gives no room to the one that is
    copied next: only those that no process acts for do. Its slabs that are still empty go."""
    folder = NvmeFolder(root, namespace, Disk())
    owner, fd = folder.claim()
    try:
        with folder.locked():
            for slab_id in folder.slab_ids():
                table = folder.table_path(slab_id)
                if is_empty(table) and not is_newer(table) and not has_owner_now(table):
                    folder.remove_slab(slab_id)
        yield
    finally:
        let_go(folder.owners, owner, fd)
