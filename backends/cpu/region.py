"""A named region of shared memory that outlives the processes that map it.

One file on tmpfs: header page, table, slots. Its owner (an engine's scheduler) holds an exclusive
lock on the `.owner` file beside it; everyone who maps it holds a shared lock on the region itself.
So a new owner can tell whether the workers of a dead one are really gone, and anyone can tell
whether a region is in use at all. The kernel drops both locks with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvtier.backends.cpu import early_memory, sharing
from kvtier.backends.cpu.region_memory import Memory
from kvtier.core.records.record import ALIGN, Buffer, padded
from kvtier.core.slab.layout import (
    ENTRY_BYTES,
    FLAG_DISCARD,
    SLOTS_MAX,
    TABLE_AT,
    SlabHeader,
    entry_at,
    read_entries,
)
from kvtier.core.slab.pieces import pinning_order
from kvtier.core.system import memory_limits
from kvtier.core.system.disk import Disk, is_locked, lock_within
from kvtier.errors import FormatError, MediumError, MediumInUse, NewerFormat

logger = logging.getLogger(__name__)

SUFFIX = ".region"
_MAKING = ".making"
_KEEP_AT = 136
_KEEP = struct.Struct("<I")
"""For how many seconds a region that nobody uses is kept; 0 if its maker died before it said so."""
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
"""All users share /dev/shm, and may lay a link there that leads anywhere."""
_DYING_S = 5.0
"""How long a new owner waits for processes of a killed engine to disappear."""
_ASKING_S = 0.2
"""How long to try for a lock: who only asks whether it is held takes it for a moment."""


class Region:
    """A mapped region. `table` and `data` are views of shared memory, valid until `close`."""

    def __init__(self, path: Path, fd: int, header: SlabHeader) -> None:
        self.path = path
        self.header = header
        self._fd = fd
        self._map = mmap.mmap(fd, header.data_end)
        self._view = memoryview(self._map)
        self.table = self._view[: header.table_bytes]
        self.data = self._view[header.data_at :]

    @classmethod
    def attach(cls, path: Path) -> Region:
        """Map a region that an owner has made; raises MediumError or FormatError."""
        try:
            fd = os.open(path, _OPEN)
        except OSError as error:
            raise MediumError(
                f"cannot open the CPU region {path} ({error.strerror}): its engine makes it first"
            ) from error
        try:
            if not lock_within(fd, fcntl.LOCK_SH, _ASKING_S):
                raise MediumError(f"the CPU region {path} is being taken over: try again")
            return cls(path, fd, read_header(fd))
        except (FormatError, MediumError, OSError, ValueError):
            os.close(fd)
            raise

    def record(self, slot: int) -> Buffer:
        """A slot's record, in place."""
        at = slot * self.header.slot_bytes
        return self.data[at : at + self.header.slot_bytes]

    def state(self, slot: int) -> int:
        """The state byte of a slot's entry."""
        return self.table[entry_at(slot)]

    def entry(self, slot: int) -> bytes:
        """A slot's entry as it stands: who copies a record compares it before and after."""
        at = entry_at(slot)
        return bytes(self.table[at : at + ENTRY_BYTES])

    @property
    def namespace(self) -> bytes:
        """The digest of the namespace whose blocks it holds."""
        return self.header.namespace

    def name_engine(self, engine: str) -> None:
        """For its owner: whose region it is, in a word that the engine's workers know, too."""
        sharing.name_engine(self.table, engine)

    def pinning_order(self) -> list[range]:
        """The slots in pieces, in the order in which a device pins them."""
        return pinning_order(self.header, read_entries(self.table, self.header.slots))

    def note_pinned(self, rank: int, slots: int) -> None:
        """For a rank: so many slots, in that order, are pinned for its device."""
        sharing.note_pinned(self.table, rank, slots)

    def set_flags(self, flags: int) -> None:
        """For its owner: whether it is to be kept may be another matter than when it was made."""
        self.header = msgspec.structs.replace(self.header, flags=flags)
        page = self.header.pack()
        self.table[: len(page)] = page

    def keep_for(self, seconds: float) -> None:
        """For its owner: how long others, who may keep theirs for less, leave it alone."""
        _KEEP.pack_into(self.table, _KEEP_AT, min(max(1, round(seconds)), 0xFFFFFFFF))

    def close(self) -> None:
        """Unmap; whoever still holds a view of a record keeps the mapping alive until it drops."""
        for view in (self.table, self.data, self._view):
            view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        # By word, because a mapping that lives on holds a duplicate of the descriptor.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def read_header(fd: int) -> SlabHeader:
    """The checked header of a region whose file is as long as it says."""
    header = SlabHeader.unpack(os.pread(fd, TABLE_AT, 0))
    if header.data_at < header.table_bytes or header.data_at % ALIGN:
        raise FormatError("the region's header is inconsistent")
    size = os.fstat(fd).st_size
    if size < header.data_end:
        raise FormatError(f"the region is cut short: {size} bytes of {header.data_end}")
    return header


def least_capacity(slot_bytes: int) -> int:
    """With less there is no room for one block, beside what tells of it."""
    return TABLE_AT + ALIGN + slot_bytes + ENTRY_BYTES


def plan_region(capacity: int, slot_bytes: int, namespace: bytes, *, discard: bool) -> SlabHeader:
    """The largest region within `capacity`, table included; raises MediumError if none fits."""
    slots = min((capacity - TABLE_AT - ALIGN) // (slot_bytes + ENTRY_BYTES), SLOTS_MAX)
    if slots < 1:
        raise MediumError(
            f"a CPU tier of {capacity} bytes holds not one block of {slot_bytes}: raise capacity "
            f"to at least {least_capacity(slot_bytes)} bytes"
        )
    return SlabHeader(
        slots=slots,
        slot_bytes=slot_bytes,
        data_at=padded(entry_at(slots)),
        slab_id=0,
        namespace=namespace,
        flags=FLAG_DISCARD if discard else 0,
    )


class OwnedRegion:
    """A region with the owner's lock held: found as it was left, or made anew."""

    def __init__(
        self,
        path: Path,
        wanted: SlabHeader,
        disk: Disk,
        near: Sequence[int] = (),
        *,
        huge_pages: bool = False,
        serving: bool = False,
    ) -> None:
        self.path = path
        self._disk = disk
        self._memory = Memory(path, near, huge_pages=huge_pages, serving=serving)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_owner(path)
        except OSError as error:
            raise MediumError(
                f"cannot make a CPU region in {path.parent} ({error.strerror}): "
                "set the cpu tier's path to a folder on tmpfs where you may write"
            ) from error
        try:
            self.region = self._open(wanted)
        except BaseException:
            if not path.exists():
                _owner_path(path).unlink(missing_ok=True)
            unlock(self._lock)
            raise

    def _open(self, wanted: SlabHeader) -> Region:
        if self.path.exists():
            reason = self._unusable(wanted)
            if reason is None:
                region = Region.attach(self.path)
                if region.header.flags != wanted.flags:
                    region.set_flags(wanted.flags)
                return region
            logger.warning("CPU region %s is made anew: %s", self.path, reason)
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                raise MediumError(
                    f"cannot make the CPU region {self.path} anew ({error.strerror}): remove it, "
                    "or give the cpu tier another name"
                ) from error
        return self._create(wanted)

    def _unusable(self, wanted: SlabHeader) -> str | None:
        """Why the region that is there cannot be taken over; None if it can."""
        try:
            fd = os.open(self.path, _OPEN)
        except OSError as error:
            return f"it cannot be opened ({error.strerror})"
        try:
            if os.fstat(fd).st_uid != os.getuid():  # who could change it under our hands
                return "it belongs to another user"
            if not lock_within(fd, fcntl.LOCK_EX, _DYING_S):
                return "processes of an earlier engine still write to it"
            found = read_header(fd)
        except (FormatError, OSError) as error:
            return str(error)
        finally:
            os.close(fd)
        if found.namespace != wanted.namespace:
            return "it belongs to another namespace (model, layout or version)"
        if (found.slots, found.slot_bytes) != (wanted.slots, wanted.slot_bytes):
            return "its capacity has changed"
        return None

    def _create(self, header: SlabHeader) -> Region:
        size, making = header.data_end, self.path.with_suffix(_MAKING)
        try:
            self._disk.unlink(making)
            fd = early_memory.claim(making, size)
            if fd is None:
                self._check_room(size)
                fd = self._disk.open(making, create=True)
            try:
                if os.fstat(fd).st_size == 0:
                    self._memory.shape(fd, size)
                self._disk.allocate(fd, size)
                os.pwrite(fd, header.pack(), 0)
            finally:
                self._disk.close(fd)
            making.rename(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._disk.unlink(making)
            free = self._disk.free_bytes(self.path.parent)
            raise MediumError(
                f"cannot make a CPU region of {size} bytes in {self.path.parent} "
                f"({error.strerror}; {free} bytes are free there): lower the cpu tier's capacity, "
                "or give shared memory more room (in containers: --shm-size)"
                + said_of_idle(self.path.parent, [self.path])
            ) from error
        return Region.attach(self.path)

    def _check_room(self, size: int) -> None:
        left = memory_limits.memory_left() if memory_limits.in_memory(self.path.parent) else None
        if left is not None and size > left:  # the system would not refuse, but kill somebody
            raise MediumError(
                f"a CPU region of {size} bytes does not fit into memory, of which {left} bytes are "
                "free (on this machine, or below its container's limit): lower the cpu tier's "
                "capacity, raise the limit, or remove regions that nobody uses (kvtier gc)"
                + said_of_idle(self.path.parent, [self.path])
            )

    def note_use(self) -> None:
        """Say by the file's time that it is in use: writing through a mapping does not."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def close(self, *, remove: bool) -> None:
        """Give the region up; its blocks stay for the next owner unless it is removed."""
        if remove:
            self.path.unlink(missing_ok=True)
        else:
            self.note_use()
        self.region.close()
        if remove:
            _owner_path(self.path).unlink(missing_ok=True)
        unlock(self._lock)


def _owner_path(path: Path) -> Path:
    return path.with_suffix(".owner")


def lock_owner(path: Path) -> int:
    """Be the owner of a region, be it there or not, until `unlock`; raises MediumInUse if somebody
    else is, and OSError."""
    owner = _owner_path(path)
    while True:
        fd = os.open(owner, _OPEN | os.O_CREAT, 0o600)
        if not lock_within(fd, fcntl.LOCK_EX, _ASKING_S):
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
    return _held(path) or _held(_owner_path(path))


def _held(path: Path) -> bool:
    """Whether a lock is held; one that cannot be tried may be."""
    try:
        return is_locked(path)
    except OSError:
        return True


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
                (keep_s,) = _KEEP.unpack(os.pread(file.fileno(), _KEEP.size, _KEEP_AT))
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
    left = own_files(folder, f"kvtier-{os.getuid()}-*{_MAKING}")
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
        if _held(path):
            return False
        for victim in (path, path.with_suffix(_MAKING), _owner_path(path)):
            victim.unlink(missing_ok=True)
    finally:
        unlock(lock)
    return True
