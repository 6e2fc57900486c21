"""Where an engine's CPU memory is: a folder of slabs on tmpfs, for all engines of a user's stack.

It lies at `<path>/kvtier-<user>-<name>-<stack>`. Its blocks outlive the engines, for `keep_for`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtier.backends.cpu.medium import (
    ROWS_MAX,
    Geometry,
    Mark,
    Region,
    marks_named,
    uses_told,
)
from kvtier.backends.cpu.memory import NewMemory, claim_ahead, slots_aligned, taken_ahead
from kvtier.errors import FormatError, MediumError, MediumInUse, NewerFormat
from kvtier.interfaces.backend import TierContext
from kvtier.record.record import record_bytes
from kvtier.settings import Duration, Persistence, TierSettings
from kvtier.slab import layout
from kvtier.slab.files import (
    LOCK,
    TABLE_SUFFIX,
    folder_locked,
    held,
    homes,
    marks,
    owner_path,
    read_header,
    read_part,
    slab_files,
    take_away,
)
from kvtier.slab.folder import MAKING_SUFFIX, FolderLimits, SlabFolder
from kvtier.system import memory as memory_limits
from kvtier.system.disk import Disk

logger = logging.getLogger(__name__)

DATA_MAKING = f".data{MAKING_SUFFIX}"
LEARNED = "learned"
"""Beside the engines' marks: like them it is made anew if it is lost, and counts for nothing."""
_KEEP = struct.Struct("<Q")
"""What the lock file of a folder holds: for how many seconds it is kept if nobody uses it."""
_NUMBERS_SHARE = 4
_NUMBERS_RANGES = 256
"""An engine has numbers for so many times its own slots, and so many ranges beside: its neighbours'
slabs have some, too."""


class CpuSettings(TierSettings, frozen=True, kw_only=True, tag="cpu"):
    """Blocks in shared memory: the tier that engines copy from and to."""

    path: str = "/dev/shm"
    """The folder, on tmpfs, that holds the memory."""
    name: str = "kv"
    """Engines with the same name, of one user and one stack, share `capacity` and find each other's
    blocks; a restarted engine finds its own."""
    persistence: Persistence = Persistence.KEEP
    """Whether blocks outlive the process."""
    keep_for: Duration = Duration(7 * 86400.0)
    """If no engine has used the memory for this long, the next engine that starts removes it."""
    huge_pages: bool = False
    """Ask for huge pages; if the system gives none, log why and go on without."""


def root_of(settings: CpuSettings, stack: str) -> Path:
    """The folder of the engines of one stack."""
    return Path(settings.path) / f"kvtier-{os.getuid()}-{settings.name}-{stack}"


def all_marks(root: Path) -> list[Path]:
    """The marks of all engines, of all namespaces, living and dead."""
    return [mark for home in homes(root) for mark in marks(home)] if root.is_dir() else []


def check_owner(root: Path) -> None:
    """Raise MediumError if something lies there that is not this user's folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        about = root.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise MediumError(
                f"{root} is not a folder of this user: remove it, or give the cpu tier another name"
            )


def in_use(root: Path) -> bool:
    """Whether any process has memory of this folder."""
    return any(map(held, all_marks(root)))


class CpuFolder(SlabFolder):
    """One namespace's part of the folder. Whoever owns slabs there has them mapped."""

    flags = layout.FLAG_MAPPED
    between_s = 0.4
    """A new engine waits for its first slab."""

    def __init__(
        self, root: Path, context: TierContext, disk: Disk, memory: NewMemory, capacity: int
    ) -> None:
        self._engine = context.engine
        self._memory = memory
        self._heard: dict[str, int] = {}
        """How many uses each neighbour's mark has told of."""
        self._shapeless: set[int] = set()
        """New files whose memory was not taken ahead."""
        slot_bytes = record_bytes(context.namespace.payload_bytes)
        self.aligned = slots_aligned(slot_bytes)
        slots = _NUMBERS_SHARE * (capacity // slot_bytes)
        rows = min(slots // self.aligned + _NUMBERS_RANGES, ROWS_MAX)
        self._geometry = Geometry(rows * self.aligned, slot_bytes, rows, context.namespace.digest)
        self._region: Region | None = None
        super().__init__(root, context.namespace, disk)

    @property
    def region(self) -> Region:
        """The engine's slabs, as its tier maps them."""
        assert self._region is not None, "whoever owns slabs has a mark"
        return self._region

    def begin_mark(self, fd: int, owner: int) -> None:
        path = owner_path(self.owners, owner)
        others = [mark for mark in all_marks(self.root) if mark != path]
        if marks_named(others, self._engine):
            raise MediumInUse(
                f"the engine name {self._engine!r} is in use in {self.root}: give each engine a "
                "name of its own"
            )
        Mark.begin(fd, self._engine, self._geometry)
        if self._region is None:
            self._region = Region(path, fd, owns=True)
        else:  # the folder was removed, and is made anew
            self._region.mark.move_to(owner)
            self._region.rebind(path, fd)

    def uses_by_others(self) -> list[list[tuple[int, int]]]:
        """Slabs and slots that requests of neighbours have used since the last call."""
        found: list[list[tuple[int, int]]] = []
        heard, self._heard = self._heard, {}
        for mark in marks(self.home):
            if mark != self.region.path:
                self._heard[mark.name], used = uses_told(mark, heard.get(mark.name))
                found += used
        return found

    def learned(self, size: int) -> memoryview | None:
        """Memory of all engines of the namespace, of this size, for what eviction learns; None if
        it cannot be had."""
        path = self.owners / LEARNED
        try:
            with self.locked():
                fd = _sized_file(path, size)
            try:
                return memoryview(mmap.mmap(fd, size))
            finally:
                os.close(fd)
        except (MediumError, OSError) as error:
            logger.warning("eviction learns without other engines: %s: %s", path, error)
            return None

    def make_file(self, path: Path, size: int) -> int:
        is_data = path.name.endswith(DATA_MAKING)
        if is_data and (fd := claim_ahead(self.root.parent, path, size)) is not None:
            return fd
        fd = super().make_file(path, size)
        if is_data:
            self._shapeless.add(fd)
        return fd

    def take_room(self, fd: int, size: int) -> None:
        if fd in self._shapeless:
            self._shapeless.remove(fd)
            self._memory.shape(fd, size)
        super().take_room(fd, size)

    def bound(self, limits: FolderLimits, used: int) -> int:
        """No more than there is memory, either: the system would not refuse it, but kill."""
        path = self.root.parent
        left = memory_limits.memory_left() if memory_limits.in_memory(path) else None
        free = self.disk.free_bytes(path)
        free = (free if left is None else min(free, left)) + taken_ahead(path)
        return min(limits.capacity, used + free)

    def last_used(self, slab_id: int) -> float:
        """From the entries, as a mapping leaves the file's time alone."""
        used = self.region.last_used(slab_id)
        return super().last_used(slab_id) if used is None else used

    def changed_ns(self, slab_id: int) -> int:
        """Not a time: who writes to a mapping leaves that alone. A number that changes with the
        entries, and with the owner."""
        if (changes := self.region.changes(slab_id)) is not None:
            return changes
        fd = self.disk.open_to_read(self.table_path(slab_id))
        try:
            return layout.changes_in(os.pread(fd, layout.TABLE_AT, 0))
        finally:
            self.disk.close(fd)


def _sized_file(path: Path, size: int) -> int:
    """Open a file of this size, all of whose room is taken: the one that is there, or a new one in
    its place. Who has that mapped keeps it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError):
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size != size:
            path.unlink()
    fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


# -- what nobody comes back to -----------------------------------------------------------------


def note_use(root: Path, keep_s: float, tables: Iterable[Path] = ()) -> None:
    """Say that the folder is in use now, and these slabs, and for how long it is kept when it is
    not: who writes to a mapping leaves the times of files alone."""
    for table in tables:
        with contextlib.suppress(OSError):
            os.utime(table)
    with contextlib.suppress(OSError):
        fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.pwrite(fd, _KEEP.pack(max(1, round(keep_s))), 0)
        finally:
            os.close(fd)


def folders(path: Path) -> Iterator[Path]:
    """All of this user's folders of CPU memory: whoever shares `path` may put others there."""
    for root in sorted(path.glob(f"kvtier-{os.getuid()}-*")):
        with contextlib.suppress(OSError):
            about = root.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid():
                yield root


def former_regions(path: Path) -> Iterator[Path]:
    """What kvtier 0.1 kept CPU memory in, and its locks, as far as no engine uses it."""
    for region in sorted(path.glob(f"kvtier-{os.getuid()}-*.region")):
        with contextlib.suppress(OSError):
            about = region.lstat()
            ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
            if ours and not held(region) and not held(region.with_suffix(".owner")):
                beside = (region.with_suffix(end) for end in (".owner", ".retained", ".making"))
                yield from (region, *(each for each in beside if each.exists()))


def leftovers(path: Path, now: float) -> list[Path]:
    """Folders that nobody will come back to: unused, and with nothing in them that is to be kept,
    or unused for as long as their last engine said."""
    found = []
    for root in folders(path):
        with contextlib.suppress(OSError, struct.error):
            if in_use(root):
                continue
            lock = root / LOCK
            (keep_s,) = _KEEP.unpack(read_part(lock, 0, _KEEP.size).ljust(_KEEP.size, b"\0"))
            unused_s = abs(now - lock.stat().st_mtime)  # a clock may have been ahead
            if unused_s > keep_s or all(map(_is_discarded, _tables(root))):
                found.append(root)
    return found


def _tables(root: Path) -> list[Path]:
    return [table for home in homes(root) for table in slab_files(home, TABLE_SUFFIX)]


def _is_discarded(table: Path) -> bool:
    """Whether nobody wants what a slab holds, now that its engine has gone."""
    try:
        header = read_header(table)
    except NewerFormat:
        return False
    except FormatError:
        return True
    return bool(header.flags & layout.FLAG_DISCARD)


def make_way(root: Path, own: str, disk: Disk) -> None:
    """Where no engine runs, the one that comes gets all there is: what is there of other models
    (and of other settings and versions) goes."""
    with folder_locked(root):
        for home in homes(root) if not in_use(root) else ():
            if home.name != own:
                logger.warning("%s goes: no engine of another model runs", home)
                shutil.rmtree(home, ignore_errors=True)
            for table in slab_files(home, TABLE_SUFFIX):
                try:
                    read_header(table)
                except (FormatError, OSError):
                    logger.warning("%s goes: it is damaged, or of another version", table)
                    take_away(disk, table)


def remove(root: Path) -> bool:
    """Delete a folder; False if somebody has begun to use it."""
    try:
        with folder_locked(root):
            if in_use(root):
                return False
            shutil.rmtree(root, ignore_errors=True)
    except FileNotFoundError:
        return True
    except (MediumError, OSError):
        return False
    return not root.exists()


def tidy_up(root: Path) -> None:
    """Remove a folder in which there is nothing any more."""
    with contextlib.suppress(OSError):
        if root.is_dir() and not _tables(root):
            remove(root)


def said_of_idle(path: Path, own: Path) -> str:
    """Which folders but this nobody uses now, for those who miss their room. An engine that has got
    another name leaves one that no command of its stack removes, for `keep_for`."""
    with contextlib.suppress(OSError):
        idle = [str(each) for each in folders(path) if each != own and not in_use(each)]
        if idle:
            return f"; no engine uses {', '.join(idle)} now: remove what none will come back to"
    return ""
