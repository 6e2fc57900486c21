"""The names in a folder of slabs, the marks that keep owners alive, and the lock of the folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from kvtier.errors import FormatError, MediumError, NewerFormat
from kvtier.slab import layout
from kvtier.slab.layout import ENTRY_BYTES, FLAG_MAPPED, SLOTS_MAX, TABLE_AT, SlabHeader, entry_at
from kvtier.system.disk import Disk, is_locked, lock_within
from kvtier.types import BlockKey

NOBODY = 0
"""The owner of a slab that was let go of, so that others adopt it."""


class SlabFile(msgspec.Struct, frozen=True):
    """A slab as it lies in the folder."""

    header: SlabHeader
    owner: int

    @property
    def id(self) -> int:
        return self.header.slab_id


def file_sizes(header: SlabHeader) -> tuple[int, int]:
    return header.data_end, header.table_bytes


_WAIT_S = 10.0


class FolderBusy(MediumError):
    """Another process holds the folder's lock for too long."""


@contextlib.contextmanager
def folder_locked(root: Path) -> Iterator[None]:
    """Hold the lock under which a folder's slabs change hands; raises FolderBusy rather than wait
    without end."""
    path, end = root / LOCK, time.monotonic() + _WAIT_S
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            if not lock_within(fd, fcntl.LOCK_EX, end - time.monotonic()):
                raise FolderBusy(
                    f"{root} is locked by a process that hangs: `fuser -v {path}` names those that "
                    "have it open; end the one that hangs"
                )
            if has_name(fd, path):  # else somebody has removed it: others take another by now
                yield
                return
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that is just being started has it open, too
            os.close(fd)


def has_name(fd: int, path: Path) -> bool:
    """Whether this is still the file of that name; raises OSError if it cannot be looked at."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


LOCK = "lock"
SAID_BYTES = 16
"""So much of a mark is what its owner tells all others (`Shares`)."""
DATA_SUFFIX = ".slab"
TABLE_SUFFIX = ".table"
_HOLD_S = 0.1
"""How long to try for an owner's lock: who asks whether it is `held` takes it for a moment."""
_PIECE_BYTES = 1 << 16
TABLE_BYTES_MAX = entry_at(SLOTS_MAX)
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
_HOME = re.compile(r"[0-9a-f]{32}")
_MARK = re.compile(r"[0-9a-f]{8}")
_WHOLE = re.compile(r"[0-9a-f]{8}\.(slab|table)")
_LIST = re.compile(r"retained-.{1,128}\.bin(\.making)?|pinned\.bin(\.making)?")
_UNFINISHED = re.compile(
    r"(namespace|[0-9a-f]{8})\.(?P<maker>[0-9a-f]{8})(\.(data|table))?\.making"
)


def homes(root: Path) -> list[Path]:
    """The folders of namespaces. What else lies in the root is somebody else's; so is what cannot
    be looked at."""
    found = []
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            if _HOME.fullmatch(path.name) and stat.S_ISDIR(path.lstat().st_mode):
                found.append(path)
    return found


def slab_files(home: Path, suffix: str) -> list[Path]:
    """The data or the table files of a namespace's slabs."""
    return [home / f"{digits}{suffix}" for digits in sorted(_slabs(home)[suffix])]


def whole(home: Path) -> set[str]:
    """The slabs of which both files are there, by the digits that name them."""
    found = _slabs(home)
    return found[DATA_SUFFIX] & found[TABLE_SUFFIX]


def _slabs(home: Path) -> dict[str, set[str]]:
    """The digits that name slabs, of data and of table files."""
    found: dict[str, set[str]] = {DATA_SUFFIX: set(), TABLE_SUFFIX: set()}
    for name in _names(home):
        if _WHOLE.fullmatch(name):
            digits, dot, suffix = name.partition(".")
            found[dot + suffix].add(digits)
    return found


def _names(home: Path) -> list[str]:
    """No paths: there may be many thousands, again and again."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return os.listdir(home)  # noqa: PTH208
    return []


def halves(home: Path) -> list[Path]:
    """Files of slabs whose other file is missing, which serve nobody; who removes one has the
    folder's lock. By name: one that cannot be looked at is there, too."""
    found = _slabs(home)
    data, tables = found[DATA_SUFFIX], found[TABLE_SUFFIX]
    alone = [home / f"{digits}{TABLE_SUFFIX}" for digits in tables - data]
    left = [home / f"{digits}{DATA_SUFFIX}" for digits in data - tables]
    return left + [table for table in alone if not is_newer(table)]


def unfinished(home: Path) -> list[tuple[Path, Path]]:
    """Files that are being made, or were when their makers died, each with its maker's mark."""
    found = [(name, _UNFINISHED.fullmatch(name)) for name in _names(home)]
    return [(home / name, home / "owners" / match["maker"]) for name, match in found if match]


def marks(home: Path) -> list[Path]:
    """The marks of a namespace's owners, living and dead. Those of the dead are removed, so
    what bears another name, or lies where a link leads to, is none."""
    owners = home / "owners"
    names = [] if os.path.islink(owners) else _names(owners)  # noqa: PTH114 - never raises
    return [owners / name for name in names if _MARK.fullmatch(name)]


def list_path(home: Path, engine: str) -> Path:
    """The file in which an engine keeps what it retains."""
    return home / f"retained-{engine}.bin"


def pins_path(home: Path) -> Path:
    """The file that says what all engines of a namespace retain."""
    return home / "pinned.bin"


def list_files(home: Path) -> list[Path]:
    """The lists of retained blocks of all engines, those first that were not written for longest;
    what is pinned is not among them."""
    found = []
    for name in _names(home):
        if name.startswith("retained-") and name.endswith(".bin") and _LIST.fullmatch(name):
            with contextlib.suppress(OSError):
                found.append(((home / name).lstat().st_mtime, home / name))
    return [path for _, path in sorted(found)]


def owner_path(owners: Path, owner: int) -> Path:
    """The file whose lock keeps an owner alive."""
    return owners / f"{owner:08x}"


def hold_owner(owners: Path, owner: int) -> int:
    """Act for an owner: its slabs are not adopted while the descriptor returned is open."""
    path = owner_path(owners, owner)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not lock_within(fd, fcntl.LOCK_SH, _HOLD_S):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process keeps it locked")
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "its mark was taken away", str(path))
    except OSError:
        os.close(fd)
        raise
    return fd


def let_go(owners: Path, owner: int, fd: int) -> None:
    """Act for an owner no more: who is the last to do so takes its mark away."""
    with contextlib.suppress(OSError):  # somebody else still acts for it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner_path(owners, owner).unlink()
    fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked off has the file open, too
    os.close(fd)


def take_away(disk: Disk, path: Path) -> None:
    """Remove what is of no use, if that can be done: a folder of that name must stop nothing."""
    with contextlib.suppress(OSError):
        disk.unlink(path)


def remove_slab(disk: Disk, table: Path) -> None:
    """Delete a slab; whoever has it open finds it empty, or zeros if it may be mapped, so that its
    room is free at once. A file with another name elsewhere is not only ours, and keeps what is in
    it."""
    data, mapped = table.with_suffix(DATA_SUFFIX), _is_mapped(table)
    disk.unlink(table)
    with contextlib.suppress(OSError):
        fd = disk.open(data)
        try:
            if os.fstat(fd).st_nlink == 1 and mapped:
                disk.empty(fd)
            elif os.fstat(fd).st_nlink == 1:
                os.ftruncate(fd, 0)
        finally:
            disk.close(fd)
    disk.unlink(data)


def _is_mapped(table: Path) -> bool:
    """Whether processes that use a slab have it mapped; what cannot be told may be so."""
    with contextlib.suppress(FormatError, OSError):
        return bool(read_header(table).flags & FLAG_MAPPED)
    return True


def remove_bare_home(path: Path) -> None:
    """Remove what a namespace has beside its slabs, which have gone, and its folder."""
    shutil.rmtree(path / "owners", ignore_errors=True)
    (path / "namespace.json").unlink(missing_ok=True)
    for name in filter(_LIST.fullmatch, _names(path)):
        with contextlib.suppress(OSError):
            (path / name).unlink()
    with contextlib.suppress(OSError):  # what else lies there is not ours
        path.rmdir()


def used_bytes(root: Path) -> int:
    """Bytes of all files below the folder, but for the marks of owners: what counts against the
    capacity. Who joins must not make it too much; and a file that cannot be looked at counts
    nothing, here as below: it must not keep slabs from being made."""
    total, folders = 0, [str(root)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name != "owners":
                            folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def held(path: Path) -> bool:
    """Whether some process holds the lock of an owner's file. What is no file has no owner; what
    cannot be asked after (too many files are open, say) may well have one."""
    try:
        return is_locked(path)
    except OSError as error:
        return error.errno not in _NO_FILE


def used_at(table: Path) -> float:
    """When a block of a slab was stored or used last: both write to its table."""
    try:
        return table.stat().st_mtime
    except OSError:
        return 0.0


def length(path: Path) -> int:
    """The bytes of a file; 0 if it has just gone, or cannot be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_empty(table: Path) -> bool:
    """Whether no slot of a slab holds anything; of one in use the beginning says that it does."""
    try:
        fd = os.open(table, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > TABLE_BYTES_MAX:
            return False  # nothing that we made, and perhaps without an end
        at = TABLE_AT
        while entries := os.pread(fd, _PIECE_BYTES, at):
            if any(entries[::ENTRY_BYTES]):
                return False
            at += len(entries)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def is_newer(table: Path) -> bool:
    """Whether a newer kvtier wrote a slab: it is left alone."""
    try:
        read_header(table)
    except (FormatError, OSError) as error:
        return isinstance(error, NewerFormat)
    return False


def read_header(table: Path) -> SlabHeader:
    """The header of a slab; raises FormatError or OSError, whatever lies there."""
    return SlabHeader.unpack(read_part(table, 0, TABLE_AT))


def read_part(file: Path, at: int, size: int) -> bytes:
    """Some bytes of a file, or fewer; none of what is no file. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, size, at) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def write_entries(disk: Disk, table: Path, entries: Mapping[int, bytes]) -> None:
    """Write the entries of these slots; a table that is gone needs none. Raises OSError."""
    try:
        fd = disk.open(table)
    except FileNotFoundError:
        return
    try:
        slots = sorted(entries)
        for start, stop in layout.runs(slots):
            data = b"".join([entries[slot] for slot in slots[start:stop]])
            if disk.writev(fd, [memoryview(data)], layout.entry_at(slots[start])) != len(data):
                raise OSError(errno.EIO, "a table entry was written in part")
    finally:
        disk.close(fd)


def hide_entry(disk: Disk, table: Path, slot: int, key: BlockKey) -> None:
    """Mark a slot as free whose entry still names this block, though it is being given to another.
    That one may be written meanwhile: then at worst the next process does not find it. Raises
    OSError."""
    try:
        fd = disk.open(table)
    except FileNotFoundError:
        return
    try:
        at = layout.entry_at(slot)
        entry = bytearray(layout.ENTRY_BYTES)
        disk.readv(fd, [memoryview(entry)], at)
        if entry[0] == layout.VALID and layout.key_in(entry) == key:
            disk.writev(fd, [memoryview(bytes([layout.FREE]))], at)
    finally:
        disk.close(fd)
