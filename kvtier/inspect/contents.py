"""What an inspector reports of a medium, and safe reads of files that nobody vouches for."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvtier.errors import naming
from kvtier.settings import RetainSettings
from kvtier.types import BlockKey, LoadStoreSpec, Namespace


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing has to be done."""
    WARN = "warn"
    """It works, but not as well as it could."""
    BAD = "bad"
    """It will not work."""


class Finding(msgspec.Struct):
    """One thing that was looked at, and what to do about it."""

    area: str
    level: Level
    what: str
    remedy: str = ""


class Garbage(msgspec.Struct):
    """Something that nobody will ask for again. `remove` looks once more whether that still holds,
    and says whether it is gone."""

    what: str
    where: str
    bytes: int
    remove: Callable[[], bool]


def of_file(what: str, path: Path, remove: Callable[[], bool]) -> Iterator[Garbage]:
    """A file that is garbage, unless it was removed since it was listed."""
    with suppress(FileNotFoundError):
        yield Garbage(what, str(path), path.stat().st_size, remove)


class Depth(enum.Enum):
    """How much of a medium is looked at: a store with millions of objects lists them in minutes."""

    NAMES = "names"
    """Which namespaces have blocks."""
    COUNTED = "counted"
    """How many blocks there are: all are listed."""
    RECORDED = "recorded"
    """What is written down about the blocks, such as a store's manifests: read in a moment, and
    without what a writer that died could not write down any more."""


class Reach(enum.Enum):
    """Whose a medium is, which says what commands do with it when no tier is named."""

    HOST = "host"
    """Memory of this machine."""
    MACHINE = "machine"
    """A disk of this machine: `prewarm` fills it."""
    SHARED = "shared"
    """A store that other machines may share: `snapshot` fills it."""


class Stored(msgspec.Struct, kw_only=True):
    """One committed block, as the listing of a backend tells of it."""

    namespace: Namespace
    key: BlockKey
    bytes: int
    """What it takes on the medium."""
    stored_at: float
    """Seconds since 1970."""
    where: str
    """Where a person finds it: a path, an address."""
    at: LoadStoreSpec
    """The same in the words of the medium: its handler loads one block from there."""
    hits: int | None = None
    """How often requests used it; None where nobody counts that."""
    used: float | None = None
    """When one did last."""


class Block(msgspec.Struct, kw_only=True):
    """One committed or quarantined block of a tier."""

    tier: int
    kind: str
    namespace: str
    key: BlockKey
    bytes: int
    stored_at: float
    place: str = ""
    hits: int | None = None
    used: float | None = None
    quarantined: bool = False
    engine: str = ""
    """The running engine in whose memory it is, where that can be told."""
    at: LoadStoreSpec | None = None

    @property
    def where(self) -> str:
        """Where a person finds it; there may be millions of whom nobody asks that."""
        return self.place


class Hold(NamedTuple):
    """Somebody who retains a block, and until when."""

    session: str
    until: float
    """Seconds since 1970; infinite, without an end."""


class Part(msgspec.Struct, kw_only=True):
    """What one tier holds of one namespace."""

    tier: int
    kind: str
    namespace: str
    blocks: int = 0
    bytes: int = 0
    """Records with their headers."""
    quarantined: int = 0
    retained: int = 0
    """Those of the blocks that are evicted last, because somebody asked for it."""
    oldest: float | None = None
    newest: float | None = None
    hits: int | None = None
    """How often requests used blocks that are there now; None where nobody counts that."""
    used: float | None = None
    """When one of them was used last."""
    in_use: bool | None = False
    """Whether an engine has it open; None where that cannot be seen, as of a store."""

    def add_times(self, oldest: float, newest: float) -> None:
        self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
        self.newest = newest if self.newest is None else max(self.newest, newest)

    def add_uses(self, hits: int, used: float) -> None:
        self.hits = hits + (self.hits or 0)
        self.used = max(used, self.used or 0.0) or None


class Cell(NamedTuple):
    """A stretch of neighbouring slots."""

    full: float
    """The share of them that holds something."""
    bad: bool
    """Whether one of them is quarantined."""


class SlotMap(Protocol):
    """The slots of a medium that has some, as `du` draws them."""

    @property
    def name(self) -> str:
        """Whose they are."""

    def cells(self, count: int) -> list[Cell]:
        """All of them, in at most so many stretches."""


class DriveWear(msgspec.Struct, kw_only=True):
    """What one drive says of itself; None and a problem, where it cannot be asked."""

    device: str
    written: int | None = None
    """Bytes, in its whole life."""
    percent_used: int | None = None
    """Of its endurance, as its maker counts that; may exceed 100."""
    problem: str = ""


class Writes(msgspec.Struct, kw_only=True):
    """What is known of the writes to a medium that wears."""

    per_day: float | None = None
    """The budget, in bytes."""
    left: float | None = None
    """What may be written now."""
    written: float | None = None
    """Bytes, by all engines and commands with a budget, since `since`."""
    since: float | None = None
    """Seconds since 1970."""
    drives: list[DriveWear] = []


class Contents(msgspec.Struct, kw_only=True):
    """One tier's medium, seen from outside."""

    where: str = ""
    capacity: int | None = None
    """Bytes that the settings allow."""
    used: int = 0
    """Bytes that count against the capacity."""
    free: int | None = None
    """Bytes free on the file system."""
    parts: list[Part] = []
    namespaces: dict[str, Namespace] = {}
    """Those whose description lies there."""
    strangers: list[str] = []
    """Names of what lies there and is not kvtier's."""
    troubles: list[str] = []
    """What could not be read, and what to do."""
    unseen: bool = False
    """Nobody knows what is there: its counts and sums say nothing."""


class Cleared(msgspec.Struct):
    """What became of one tier's part of a namespace; `kept` says why it stays."""

    tier: int
    kind: str
    namespace: str
    blocks: int
    bytes: int = 0
    kept: str = ""


class Bar(Protocol):
    """How far something has come."""

    def advance(self, count: int, size: int = 0) -> None:
        """So much more is done."""


class _NoBar:
    def advance(self, count: int, size: int = 0) -> None:
        pass


class Reporter:
    """What an inspector says while it works; here nobody listens."""

    def warn(self, text: str) -> None:
        """What the caller should know, though the work goes on."""

    @contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        """How far something comes that takes a while."""
        yield _NoBar()


class InspectorContext(msgspec.Struct, frozen=True):
    """From where an inspector is asked: the number of its tier, and its stack."""

    tier: int = 0
    engine: str = "default"
    """The stack's name, which private media carry."""
    reporter: Reporter = Reporter()
    """Hears what there is to say meanwhile."""
    retain_share: float = RetainSettings().share
    """How much of each tier of that stack retained blocks may take; 0: nothing is retained."""


NAMESPACE_ID = re.compile(r"[0-9a-f]{32}")


def standing(folder: Path) -> Path:
    """A tier's folder, or as long as nobody has made it, the one in which it will be."""
    return folder if folder.is_dir() else folder.parent


def read_file(path: Path, most: int, at: int = 0) -> bytes:
    """At most so many bytes of an ordinary file; raises OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(22, "not an ordinary file", str(path))
        pieces = []
        with naming(path):
            while most > 0 and (piece := os.pread(fd, min(most, 1 << 24), at)):
                pieces.append(piece)
                at, most = at + len(piece), most - len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def read_namespace(text: bytes, name: str) -> Namespace | None:
    """A namespace's description, if it is the one that its name says."""
    try:
        namespace = Namespace.from_json(text)
    except msgspec.ValidationError:
        return None
    return namespace if namespace.id == name else None


def size_below(folder: Path) -> int:
    """The bytes of all files below a folder that can be looked at."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


class Locked(NamedTuple):
    """The files that live processes hold an flock on."""

    files: set[tuple[int, int]]
    """Device and inode of each."""
    mounted: set[int]
    """All devices that are mounted."""

    def has(self, path: Path) -> bool:
        """Whether a live process holds this file."""
        try:
            status = path.stat()
        except OSError:
            return False
        if status.st_dev in self.mounted:
            return (status.st_dev, status.st_ino) in self.files
        # Some file systems (btrfs) answer a device here that the kernel's lists do not know.
        return any(inode == status.st_ino for _, inode in self.files)


def locked_files() -> Locked:
    """What is locked now.

    Read from the kernel's list: to try the lock could make an engine that starts just now believe
    that another one is there.
    """
    found = Locked(set(), set())
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_bytes().splitlines():
            words = line.split()
            if words[1] == b"FLOCK":
                major, minor, inode = words[5].split(b":")
                found.files.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    with contextlib.suppress(OSError, ValueError, IndexError):
        # In bytes: a folder may be called anything.
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            major, minor = line.split()[2].split(b":")
            found.mounted.add(os.makedev(int(major), int(minor)))
    return found
