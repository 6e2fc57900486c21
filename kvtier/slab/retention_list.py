"""The list of retained blocks in a file: one version, one checksum, and a bound on everything.

A few KiB for most engines, written as a whole under another name. Whoever reads it believes nothing
of it: what is damaged, too large or another's is no list (docs/reference/format.md).
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from kvtier.errors import UNREADABLE, FormatError, NewerFormat
from kvtier.eviction.retention import BLOCKS_MAX, PINNED, SESSIONS_MAX, RetainedBlocks, Sessions
from kvtier.record.record import Buffer
from kvtier.slab.files import list_files, list_path, pins_path
from kvtier.slab.folder import SlabFolder
from kvtier.system.disk import Disk, write_all
from kvtier.types import GROUP_BYTES, KEY_BYTES_MAX, BlockKey

MAGIC = b"KVTKEEP\n"
VERSION = 1
MAKING_SUFFIX = ".making"
BYTES_MAX = 8 << 20
_SESSION_BYTES_MAX = 1024
# magic, version, bytes of the body, xxh3 of the body, namespace
_HEAD = struct.Struct("<8sIIQ16s")

_Key = Annotated[bytes, msgspec.Meta(min_length=GROUP_BYTES + 1, max_length=KEY_BYTES_MAX)]


class _Run(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Blocks of one session with the same end."""

    session: Annotated[str, msgspec.Meta(max_length=_SESSION_BYTES_MAX)]
    until: float
    """Seconds since 1970; infinite, if they have no end."""
    keys: list[_Key]


_DECODER = msgspec.msgpack.Decoder(list[_Run])


def encode(sessions: Sessions, namespace: bytes) -> bytes:
    """The whole file."""
    runs = []
    for session, blocks in sessions.items():
        by_end: dict[float, list[bytes]] = {}
        for key, until in blocks.items():
            by_end.setdefault(until, []).append(key)
        runs += [_Run(session, until, keys) for until, keys in by_end.items()]
    body = msgspec.msgpack.encode(runs)
    digest = xxhash.xxh3_64_intdigest(body)
    return _HEAD.pack(MAGIC, VERSION, len(body), digest, namespace) + body


def decode(data: bytes, namespace: bytes) -> dict[str, dict[BlockKey, float]]:
    """What a file says of this namespace; raises FormatError on all that `encode` does not make."""
    if len(data) < _HEAD.size or len(data) > BYTES_MAX:
        raise FormatError("it is cut short, or far too long")
    magic, version, size, digest, said = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != MAGIC:
        raise FormatError("not a list of retained blocks")
    if version != VERSION:
        raise NewerFormat(f"version {version}; this kvtier reads version {VERSION}")
    if size != len(body) or digest != xxhash.xxh3_64_intdigest(body):
        raise FormatError("it fails its checksum")
    if said != namespace:
        raise FormatError("it belongs to another namespace")
    try:
        runs = _DECODER.decode(body)
    except UNREADABLE as error:
        raise FormatError(f"it is none of kvtier's: {error}") from None
    found: dict[str, dict[BlockKey, float]] = {}
    if sum(len(run.keys) for run in runs) > 2 * BLOCKS_MAX:
        raise FormatError("it names more blocks than any tier retains")
    for run in runs:
        if math.isnan(run.until):
            raise FormatError("it has an end that is no time")
        mine = found.setdefault(run.session, {})
        mine.update({BlockKey(key): run.until for key in run.keys})
    if len(found) > SESSIONS_MAX + 1:
        raise FormatError("it names more sessions than any tier knows")
    return found


def read(path: Path, namespace: bytes) -> dict[str, dict[BlockKey, float]]:
    """What a file says; nothing, if it is not there. Raises FormatError, or OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return {}
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise FormatError("it is no ordinary file")
        if about.st_uid not in (os.geteuid(), 0):
            raise FormatError("it is another user's")
        return decode(file.read(BYTES_MAX + 1), namespace)


def read_pins(path: Path, namespace: bytes) -> dict[BlockKey, float]:
    """What is pinned, as `read`."""
    return read(path, namespace).get(PINNED, {})


def write(disk: Disk, path: Path, sessions: Sessions, namespace: bytes) -> None:
    """Replace a file as a whole, or remove it if there is nothing to say; raises OSError."""
    if not any(sessions.values()):
        disk.unlink(path)
        return
    making = path.with_name(path.name + MAKING_SUFFIX)
    disk.unlink(making)  # a process died while it wrote
    fd = disk.open(making, create=True)  # 0600
    try:
        data: Buffer = memoryview(bytearray(encode(sessions, namespace)))
        write_all(disk, fd, [data], 0)
    finally:
        disk.close(fd)
    disk.rename(making, path)


_LEAST_S = 0.05
_SHARE = 50
"""Writing takes at most one part in so many of the time."""
_FAILED_S = 60.0
_LISTS_MAX = 64
"""The oldest lists beyond are removed: of engines whose names nobody uses any more."""


class RetentionFiles:
    """What a tier retains, in files: its list lies in the folder, and beside it what people pin.
    What cannot be read or written is said, and is no failure.

    Both are read and written by the keeper's thread, but for the start. Each engine has a list
    under its name; all engines of a namespace heed what is pinned.
    """

    def __init__(
        self,
        retained: RetainedBlocks,
        folder: SlabFolder,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retained = retained
        self._home = folder.home
        self._namespace = folder.namespace.digest
        self._disk = folder.disk
        self._warn = warn
        self._clock = clock
        self._list: Path | None = None
        self._next = 0.0
        self._heeds_pins = False
        self._read: deque[dict[BlockKey, float]] = deque(maxlen=1)
        """Read by the keeper's thread, to be taken in by the tier's own."""
        self._read_stamp: tuple[int, int, int] | None = None

    def begin(self, engine: str) -> None:
        """Retain what an earlier process with this name has retained, and what is pinned."""
        self._list = list_path(self._home, engine)
        try:
            self._retained.restore(read(self._list, self._namespace))
        except (FormatError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            self._warn(f"what was retained before is not any more: {self._list}: {reason}")
        self._begin_with_pins()
        for old in list_files(self._home)[:-_LISTS_MAX]:
            with contextlib.suppress(OSError):
                self._disk.unlink(old)

    def begin_as_others(self) -> None:
        """Retain what engines of the namespace have, and what is pinned."""
        for path in list_files(self._home):
            try:
                self._retained.restore(read(path, self._namespace))
            except (FormatError, OSError) as error:
                self._warn(f"{path} does not say what is retained: {error}")
        self._begin_with_pins()

    def _begin_with_pins(self) -> None:
        self._heeds_pins = True
        self._look_at_pins()
        self.take_pins()

    def take_pins(self) -> bool:
        """Retain what people have pinned since the last call; whether that has changed."""
        if not self._read:
            return False
        self._retained.pin(self._read.pop())
        return True

    def look(self, *, at_end: bool = False) -> None:
        """For the keeper's thread: write the list if that has changed, not too often but `at_end`,
        and read what is pinned."""
        due = at_end or self._clock() >= self._next
        if self._list is not None and self._retained.changed and due:
            self._write(self._list)
        if self._heeds_pins and not at_end:
            self._look_at_pins()

    def _write(self, path: Path) -> None:
        began = self._clock()
        try:
            write(self._disk, path, self._retained.take_all(), self._namespace)
            self._next = began + max(_LEAST_S, _SHARE * (self._clock() - began))
        except OSError as error:
            self._retained.changed = True
            self._next = self._clock() + _FAILED_S
            self._warn(f"what is retained is not kept for the next start: {error}")

    def _look_at_pins(self) -> None:
        """Read what is pinned if that has changed; what cannot be read changes nothing."""
        path = pins_path(self._home)
        seen = _stamp(path)
        if seen == self._read_stamp:
            return
        self._read_stamp = seen
        try:
            self._read.append(read_pins(path, self._namespace))
        except (FormatError, OSError) as error:
            self._warn(f"{path} does not say what is pinned: {error}")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size
