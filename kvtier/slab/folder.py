"""A folder of slabs: by namespace, with their owners and the byte budget.

Every slab has one owner, the only process that writes to it; everyone may read it. An owner is
alive while somebody holds a shared lock on its file in `owners/` (its tier and its handlers do, and
the kernel drops the lock with them). Slabs of the dead are adopted with all they hold. What
concerns several processes (owners, new slabs, the budget) is decided under one folder-wide lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from kvtier.errors import FormatError, KVTierError, MediumError
from kvtier.record.record import Buffer
from kvtier.settings import WHOSE
from kvtier.slab.files import (
    DATA_SUFFIX,
    NOBODY,
    TABLE_SUFFIX,
    SlabFile,
    file_sizes,
    folder_locked,
    held,
    homes,
    length,
    marks,
    owner_path,
    remove_slab,
    take_away,
    used_at,
    whole,
)
from kvtier.slab.layout import OWNER, OWNER_AT, TABLE_AT, SlabHeader
from kvtier.system.disk import Disk, read_all
from kvtier.types import NAMESPACE_BYTES_MAX, Namespace

logger = logging.getLogger(__name__)

_SLACK_SHARE = 4
"""This part of a slab is left free above the floor. Who has fallen below the floor gives up a whole
slab: if that were made again at once, it would go for the next little thing that others write."""

_SLAB_MIN = 1 << 20
_SLAB_USUAL = 64 << 20
_SLAB_MAX = 1 << 30
_SLABS_USUAL = 64
"""Engines that share a folder have equal parts of it but for one slab."""
_SLABS_MIN = 4
"""A folder has room for so many at least: a slab is what engines that share one hand over."""
_SLABS_MAX = 1 << 14
"""And for so many at most: a keeper lists all of them, again and again."""


class FolderLimits(msgspec.Struct, frozen=True):
    """What the settings allow, in bytes."""

    capacity: int
    free_floor: int
    slot_bytes: int
    slab_bytes: int
    discard: bool = False
    """Whether what is stored is for this process alone."""
    keep_s: float = 0.0
    """How long an idle namespace keeps its share after its last use."""
    slack: int = 0
    """So much of the capacity is left to small files that come later."""
    grows: bool = True
    """Whether slabs are made; else what is there is only read."""


def slab_bytes(capacity: int) -> int:
    """How large slabs are made: a small part of the folder, but neither tiny nor huge."""
    usual = min(_SLAB_USUAL, capacity // _SLABS_MIN)
    most = max(_SLAB_MAX, capacity // _SLABS_MAX)
    return min(capacity, max(_SLAB_MIN, usual, min(most, capacity // _SLABS_USUAL)))


def kept_free(free_floor: int, slab_bytes: int) -> int:
    """What must stay free on the disk when slabs of this size are made."""
    return free_floor + slab_bytes // _SLACK_SHARE


_HOMES_MAX = 256


def differs_in(root: Path, namespace: Namespace) -> str:
    """The facts in which what a folder holds of the same model differs, and of that what changed
    last; nothing if there is none."""
    found: list[tuple[float, Namespace]] = []
    with contextlib.suppress(OSError):
        for home in homes(root)[:_HOMES_MAX]:
            other = _described(home / "namespace.json")
            if other is None or home.name == namespace.id:
                continue
            if other.model and other.model == namespace.model:
                found.append((home.stat().st_mtime, other))
    if not found:
        return ""
    latest = max(found, key=lambda pair: pair[0])[1]
    said = "; ".join(str(each) for each in namespace.differences(latest))
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in said)


def _described(path: Path) -> Namespace | None:
    with contextlib.suppress(OSError, msgspec.ValidationError):
        if path.is_file() and length(path) <= NAMESPACE_BYTES_MAX:
            return Namespace.from_json(path.read_bytes())
    return None


MAKING_SUFFIX = ".making"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SlabFolder:
    """One namespace's part of a folder, and the folder-wide rules it obeys."""

    between_s = 1.0
    """How often a keeper looks after more than what others have written."""
    flags = 0
    """What the headers of its slabs say of them."""
    aligned = 1
    """The slots of each slab have a range of numbers whose length is a multiple of this."""
    settled_ns = 2_500_000_000
    """A listing is kept only if the folder had not changed for so long: times are coarse, on some
    disks two seconds, and what comes after the listing may leave the same."""

    def __init__(self, root: Path, namespace: Namespace, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self.namespace = namespace
        self.home = root / namespace.id
        self.owners = self.home / "owners"
        self._device: int | None = None
        self._slab_ids: Set[int] = frozenset()
        self._listed_at = -1
        self.establish()

    def establish(self) -> None:
        """Make what is missing of the folder; raises MediumError if it cannot be used, or if its
        disk was unmounted: what lies below the mount point belongs to the system's disk."""
        with self._explained():
            standing = self.root if self.root.exists() else self.root.parent
            if self._device not in (None, standing.stat().st_dev):
                raise MediumError(
                    "its disk is gone: nothing is stored there until that is back, or the engine "
                    "is started again"
                )
            self.root.mkdir(mode=0o700, exist_ok=True)
            self._device = self.root.stat().st_dev
            with self.locked():
                self._make_home()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror
            remedy = "name a folder where you may write, on a local disk"
            if error.errno in NO_ROOM:
                remedy = "free some room there"
            elif isinstance(error, PermissionError) and os.access(self.root, os.W_OK | os.X_OK):
                reason = f"{error.filename}: {reason}"
                remedy = f"another user has stored there: {WHOSE}"
            raise MediumError(f"cannot use {self.root} for a tier ({reason}): {remedy}") from error

    def _make_home(self) -> None:
        """Under the lock: this namespace's folders and its description."""
        for folder in (self.home, self.owners):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink():  # nobody counts what lies behind it
                raise OSError(errno.ELOOP, f"{folder} is a link: remove it")
        try:
            self.describe()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise  # else an engine starts all the same: before the first slab comes another try

    def describe(self) -> None:
        """Leave the namespace's JSON beside the data, for people and for `explain`."""
        path, text = self.home / "namespace.json", self.namespace.to_json()
        if path.is_file() and length(path) == len(text) and path.read_bytes() == text:
            return
        begun = path.exists()
        making = path.with_suffix(f".{secrets.token_hex(4)}{MAKING_SUFFIX}")
        try:
            making.write_bytes(text)
            making.chmod(0o600)
            making.rename(path)
        except OSError:
            making.unlink(missing_ok=True)
            raise
        if not begun and (facts := differs_in(self.root, self.namespace)):
            logger.warning(
                "%s has nothing of this model as it is now, and what it has does not fit: %s",
                self.root,
                facts,
            )

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder's lock; raises FolderBusy rather than wait without end."""
        return folder_locked(self.root)

    # -- what differs between media ----------------------------------------------------------

    def begin_mark(self, fd: int, owner: int) -> None:
        """A new owner's mark is there, under the lock; raises MediumInUse if it may not be."""

    def make_file(self, path: Path, size: int) -> int:
        """Under the lock: a new file of this length, which counts against the budget at once."""
        fd = self.disk.open(path, create=True)
        try:
            os.ftruncate(fd, size)
        except OSError:
            self.disk.close(fd)
            raise
        return fd

    def take_room(self, fd: int, size: int) -> None:
        """Without the lock: have all the room of a new file."""
        self.disk.allocate(fd, size)

    # -- owners ----------------------------------------------------------------------------

    def claim(self) -> tuple[int, int]:
        """Become an owner: an identity and the descriptor whose lock keeps it alive. Takes away
        the marks of the dead, which no slab needs."""
        with self._explained(), self.locked():
            self._make_home()  # again: without an owner so far, a neighbour may have reclaimed it
            for mark in marks(self.home):
                if not held(mark):
                    take_away(self.disk, mark)
            while True:
                owner = secrets.randbits(32)
                with contextlib.suppress(FileExistsError):
                    if owner != NOBODY:
                        path = owner_path(self.owners, owner)
                        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                        try:
                            fcntl.flock(fd, fcntl.LOCK_SH)
                            self.begin_mark(fd, owner)
                        except (KVTierError, OSError):  # who lives on must not seem to use it
                            take_away(self.disk, path)
                            os.close(fd)
                            raise
                        return owner, fd

    def alive(self, owner: int) -> bool:
        """Whether some process still acts for this owner."""
        return owner != NOBODY and held(owner_path(self.owners, owner))

    def is_only_owner(self, owner: int) -> bool:
        """Whether no other owner of this namespace is alive."""
        mine = owner_path(self.owners, owner)
        return not any(held(path) for path in marks(self.home) if path != mine)

    def last_used(self, slab_id: int) -> float:
        """When a block of a slab was stored or used last."""
        return used_at(self.table_path(slab_id))

    # -- slabs -----------------------------------------------------------------------------

    def slab_ids(self) -> Set[int]:
        """The slabs that are there now, whole. There may be thousands: they are listed anew only if
        files have come or gone, or there was none. No time says when a closed folder opens."""
        now, changed = time.time_ns(), 0  # not later: what changes meanwhile may bear the same time
        with contextlib.suppress(OSError):
            changed = self.home.stat().st_mtime_ns
        if not self._slab_ids or changed != self._listed_at:
            self._slab_ids = frozenset(int(digits, 16) for digits in whole(self.home))
            self._listed_at = changed if abs(now - changed) > self.settled_ns else -1
        return self._slab_ids

    def data_path(self, slab_id: int) -> Path:
        return self.home / f"{slab_id:08x}{DATA_SUFFIX}"

    def table_path(self, slab_id: int) -> Path:
        return self.home / f"{slab_id:08x}{TABLE_SUFFIX}"

    def changed_ns(self, slab_id: int) -> int:
        """When a slab's table was written to last; raises OSError."""
        return os.stat(f"{self.home}/{slab_id:08x}{TABLE_SUFFIX}").st_mtime_ns  # noqa: PTH116 - slow

    def read_table(self, slab_id: int) -> tuple[SlabFile, bytes]:
        """Header and entries of a slab; raises FormatError or OSError if they are not in order."""
        path = self.table_path(slab_id)
        fd = self.disk.open_to_read(path)
        try:
            header = SlabHeader.unpack(self._read(fd, TABLE_AT))
            if header.namespace != self.namespace.digest or header.slab_id != slab_id:
                raise FormatError(f"{path} belongs to another slab or namespace")
            if os.fstat(fd).st_size < header.table_bytes:
                raise FormatError(f"{path} is cut short")
            table = self._read(fd, header.table_bytes)
        finally:
            self.disk.close(fd)
        if self.data_path(slab_id).lstat().st_size < header.data_end:
            raise FormatError(f"{self.data_path(slab_id)} is cut short")
        return SlabFile(header, OWNER.unpack_from(table, OWNER_AT)[0]), bytes(table)

    def _read(self, fd: int, size: int) -> Buffer:
        """The first bytes of a file."""
        into = memoryview(bytearray(size))
        if read_all(self.disk, fd, [into], 0) < size:
            raise FormatError("the table is cut short")
        return into

    def write_owner(self, slab_id: int, owner: int) -> None:
        """Hand a slab over; only under the folder's lock."""
        fd = self.disk.open(self.table_path(slab_id))
        try:
            self.disk.writev(fd, [memoryview(OWNER.pack(owner))], OWNER_AT)
        finally:
            self.disk.close(fd)

    def bound(self, limits: FolderLimits, used: int) -> int:
        """What the folder may hold, or can where its disk is full before that."""
        free = self.disk.free_bytes(self.root) - kept_free(limits.free_floor, limits.slab_bytes)
        return min(limits.capacity, used + free)

    def cut_off(self, slabs: Iterable[SlabFile]) -> int:
        """Bytes that somebody has cut off these slabs: what is written next brings them back."""
        return sum(
            max(0, file_sizes(slab.header)[0] - length(self.data_path(slab.id))) for slab in slabs
        )

    def remove_slab(self, slab_id: int) -> None:
        """Delete both of its files."""
        remove_slab(self.disk, self.table_path(slab_id))
