"""The list of retained blocks in a file: one version, one checksum, and a bound on everything.

A few KiB for most engines, written as a whole under another name. Whoever reads it believes nothing
of it: what is damaged, too large or another's is no list (docs/reference/format.md).
"""

from __future__ import annotations

import logging
import math
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from kvtier.errors import UNREADABLE, FormatError, NewerFormat
from kvtier.eviction.retention import BLOCKS_MAX, PINNED, SESSIONS_MAX, RetainedBlocks, Sessions
from kvtier.record.record import Buffer
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


logger = logging.getLogger(__name__)

_LEAST_S = 0.05
_SHARE = 50
"""Writing takes at most one part in so many of the time."""
_FAILED_S = 60.0


class KeptList:
    """The file of one list. What cannot be read or written is said once, and is no failure."""

    def __init__(
        self,
        retained: RetainedBlocks,
        path: Path,
        namespace: bytes,
        disk: Disk,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._retained = retained
        self._namespace = namespace
        self._disk = disk
        self._clock = clock
        self._next = 0.0
        self._failed = False

    def begin(self) -> None:
        """Retain what an earlier process has retained."""
        try:
            self._retained.restore(read(self.path, self._namespace))
        except (FormatError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            logger.warning("what was retained before is not any more: %s: %s", self.path, reason)

    def write(self, *, at_once: bool = False) -> None:
        """Write the list if it has changed, not too often, or `at_once`; not for two threads at the
        same time. May block."""
        began = self._clock()
        if not self._retained.changed or not (at_once or began >= self._next):
            return
        try:
            sessions = self._retained.take_all()
            write(self._disk, self.path, sessions, self._namespace)
        except OSError as error:
            self._retained.changed = True
            self._next = self._clock() + _FAILED_S
            if not self._failed:
                logger.warning("what is retained is not kept for the next start: %s", error)
            self._failed = True
            return
        self._failed = False
        self._next = began + max(_LEAST_S, _SHARE * (self._clock() - began))
