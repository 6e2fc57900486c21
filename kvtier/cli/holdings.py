"""What a stack's media hold, read from outside: nothing is opened as a tier, locked or written.

A running engine does not notice. What is read may therefore be a moment old, and a block that is
just being written may look as if it were not there.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.cli.console import naming, said_of
from kvtier.config import StackConfig
from kvtier.core.settings import TierSettings
from kvtier.core.slab.layout import (
    BAD,
    ENTRY_BYTES,
    RESERVED,
    TABLE_AT,
    SlabHeader,
    committed,
    read_entries,
)
from kvtier.types import BlockKey, Namespace

NAMESPACE_ID = re.compile(r"[0-9a-f]{32}")
BENCH_MARK = ".kvtier-bench-"
"""How the names of the folders begin that measuring makes, and removes."""


class Slab(msgspec.Struct, kw_only=True):
    """A table and its slots: a CPU region, or one slab of an NVMe folder."""

    table: Path
    data: Path
    header: SlabHeader
    in_use: bool
    engine: str
    """Whose it is: an engine's name, or in an NVMe folder an owner's number."""

    @property
    def namespace(self) -> str:
        return self.header.namespace.hex()

    @property
    def bytes(self) -> int:
        """What the slab takes of its medium."""
        return self.header.table_bytes + self.header.slots * self.header.slot_bytes

    def entries(self) -> npt.NDArray[np.void]:
        """The table as it is now; shorter if its file was cut meanwhile, empty if removed."""
        text = b""
        with contextlib.suppress(FileNotFoundError):
            text = read_file(self.table, self.header.table_bytes)
        slots = max(0, min(self.header.slots, (len(text) - TABLE_AT) // ENTRY_BYTES))
        return read_entries(text.ljust(TABLE_AT, b"\0"), slots)


class Part(msgspec.Struct, kw_only=True):
    """What one tier holds of one namespace."""

    tier: int
    kind: str
    namespace: str
    blocks: int = 0
    bytes: int = 0
    """Records with their headers."""
    quarantined: int = 0
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


def _nothing(_prefixes: Iterable[str]) -> Iterable[Any]:
    return ()


class Place(msgspec.Struct, kw_only=True):
    """One tier's medium, seen from outside."""

    tier: int
    kind: str
    where: str
    capacity: int | None = None
    """Bytes that the settings allow."""
    used: int = 0
    """Bytes that count against the capacity."""
    free: int | None = None
    """Bytes free on the file system."""
    slabs: list[Slab] = []
    parts: list[Part] = []
    list_objects: Callable[[Iterable[str]], Iterable[Any]] = _nothing
    """Lists anew what lies in a store below these prefixes, as its own `ObjectInfo`: of millions
    nobody holds a list."""
    manifests: dict[str, npt.NDArray[np.void]] = {}
    """By namespace, what a quick look has found written down of a store's blocks."""
    uses: dict[str, tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]] = {}
    """And how often each of these was used, and when last."""
    used_blocks: dict[str, dict[BlockKey, tuple[int, float]]] = {}
    """By namespace, how often the blocks that a listing has found were used, and when last; it
    lacks those that never were, and namespaces of which nobody has counted it."""
    served: dict[str, float] = {}
    """By namespace, when a server last said in a store that it runs, or what it has used."""
    namespaces: dict[str, Namespace] = {}
    strangers: list[str] = []
    """Names of what lies there and is not kvtier's."""
    broken: list[Path] = []
    """Tables of this version that are not as they must be."""
    troubles: list[str] = []
    """What could not be read, and what to do."""
    unseen: bool = False
    """Nobody knows what is there: its counts and sums say nothing."""


def look(
    config: StackConfig,
    tier: int | None = None,
    *,
    quick: bool = False,
    count: bool = True,
    uses_of: str | None = None,
) -> list[Place]:
    """Every tier of a stack, or one.

    A store is listed, which takes minutes where it has millions of objects. `quick` reads what is
    written down of its blocks instead. Without `count` it is only asked which namespaces have
    blocks. How often its blocks were used is read of the namespaces that begin with `uses_of`.
    """
    return [
        _look_at(index, config, quick, count, uses_of)
        for index in range(len(config.tiers))
        if tier is None or index == tier
    ]


def _look_at(
    tier: int, config: StackConfig, quick: bool, count: bool, uses_of: str | None
) -> Place:
    """A tier as far as it can be seen: a disk that is dead hides no other."""
    from kvtier.cli import look_objects, look_slabs

    settings = config.tiers[tier]
    place = Place(tier=tier, kind=settings.kind, where=where_of(settings), unseen=True)
    try:
        match settings.kind:
            case "cpu":
                return look_slabs.look_at_regions(tier, config)
            case "nvme":
                return look_slabs.look_at_folder(tier, config)
            case "object":
                return look_objects.look_at_store(
                    tier, config, quick=quick, count=count, uses_of=uses_of
                )
            case "memory":
                place.where = "memory of each process"
            case kind:
                place.where = ""
                place.troubles.append(
                    f"what a tier of kind {kind} holds cannot be seen from outside: an engine's "
                    "/metrics say how much; where a command has --tier, that leaves it out"
                )
    except OSError as error:
        place.troubles.append(said_of(error))
    return place


def where_of(settings: TierSettings) -> str:
    """Where a tier keeps its blocks, as its settings say it."""
    return str(getattr(settings, "path", None) or getattr(settings, "url", None) or "")


def known_namespaces(places: Iterable[Place]) -> dict[str, Namespace]:
    """All namespaces whose description lies somewhere."""
    return {name: each for place in places for name, each in place.namespaces.items()}


def count_parts(place: Place) -> None:
    """Sum the slabs of a place by namespace; one whose table its disk does not give is a trouble,
    and no slab."""
    parts: dict[str, Part] = {}
    slabs, place.slabs = place.slabs, []
    for slab in slabs:
        try:
            entries = slab.entries()
        except OSError as error:
            place.troubles.append(said_of(error))
            continue
        place.slabs.append(slab)
        part = parts.setdefault(
            slab.namespace, Part(tier=place.tier, kind=place.kind, namespace=slab.namespace)
        )
        valid = committed(entries)
        part.blocks += len(valid)
        part.bytes += len(valid) * slab.header.slot_bytes
        part.quarantined += int((entries["state"] == BAD).sum())
        part.in_use = part.in_use or slab.in_use
        if len(valid):
            times = entries["stored_at"][valid]
            part.add_times(float(times.min()), float(times.max()))
            part.add_uses(
                int(entries["uses"][valid].sum(dtype=np.uint64)),
                float(entries["used_at"][valid].max()),
            )
    place.parts += sorted(parts.values(), key=lambda part: -part.bytes)


def picture(slab: Slab, width: int) -> str:
    """The slots of a slab as a line: how full each stretch of it is, and what is quarantined."""
    states = slab.entries()["state"]
    if not len(states):
        return ""
    cells = np.array_split(states, min(width, len(states)))
    shades = "·░▒▓█"
    line = []
    for cell in cells:
        full = float((cell != 0).mean()) if not (cell == RESERVED).all() else 1.0
        line.append("x" if (cell == BAD).any() else shades[min(4, round(full * 4 + 0.3))])
    return "".join(line)


# -- files, as somebody reads them who trusts none of them -----------------------------------


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
