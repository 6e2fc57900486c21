"""What is left of a folder's write budget, in a file that its engines share.

One record of 64 bytes, written in place by one call under the folder's lock: who dies leaves the
record before or the one after. What cannot be read, or was not written by kvtier, counts as a
budget that is used up. So damage costs blocks that are not written, never the drive.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from kvtier.backends.nvme.folder.lock import folder_locked
from kvtier.core.wear.dynamic_admission import SPREAD_S
from kvtier.core.wear.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

NAME = "writes"
_RECORD = struct.Struct("<8sdddddd")
_SUM = struct.Struct("<Q")
_MAGIC = b"kvtwear1"
_BYTES = _RECORD.size + _SUM.size
_NUMBER_MAX = 1e24


class Entry(msgspec.Struct, frozen=True):
    """What the file says."""

    rate: float
    burst: float
    level: float
    at: float
    written: float
    """Bytes, by all engines with a budget, since `since`."""
    since: float

    @property
    def bucket(self) -> TokenBucket:
        return TokenBucket(self.rate, self.burst, self.level, self.at)


class WriteLedger:
    """The budget of one folder, for an engine's keeper."""

    def __init__(
        self, root: Path, rate: float, burst: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = root / NAME
        self.root = root
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._said: set[str] = set()

    def exchange(self, spent: float, wanted: float, owed: float = 0.0) -> tuple[float, Entry]:
        """Tell what was written since the last call, and take as much more as there is of what is
        `wanted`; less than nothing is given back. What was written beyond a lease is `owed`.
        Answers with what was granted. Raises OSError, or FolderBusy."""
        with folder_locked(self.root):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.path, flags, 0o600)
            try:
                now = self._clock()
                before = self._read(fd, now)
                bucket = self._filled(before, now)
                bucket.charge(owed)
                granted = bucket.take(wanted) if wanted > 0 else wanted
                if wanted < 0:
                    bucket.put_back(-wanted)
                entry = Entry(
                    self._rate,
                    self._burst,
                    bucket.level,
                    now,
                    before.written + max(0.0, spent),
                    before.since,
                )
                text = pack(entry)
                if os.pwrite(fd, text, 0) != len(text):
                    raise OSError(errno.EIO, f"{self.path} was written in part")
                if os.fstat(fd).st_size > _BYTES:  # damage
                    os.ftruncate(fd, _BYTES)
            finally:
                os.close(fd)
        return granted, entry

    def look(self) -> Entry | None:
        """What is left now, as far as the file says; changes nothing and waits for nobody."""
        entry, now = read_entry(self.path), self._clock()
        if entry is None:
            return None
        return msgspec.structs.replace(entry, level=self._filled(entry, now).level, at=now)

    def _filled(self, entry: Entry, now: float) -> TokenBucket:
        self._compare(entry)
        bucket = TokenBucket(self._rate, self._burst, min(entry.level, self._burst), entry.at)
        bucket.fill(now)
        return bucket

    def _read(self, fd: int, now: float) -> Entry:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, f"{self.path} is no file: remove it")
        text = os.pread(fd, _BYTES + 1, 0)
        if not text:  # a new budget has what is left of one in use in the long run
            level = min(self._burst, SPREAD_S * self._rate)
            return Entry(self._rate, self._burst, level, now, 0.0, now)
        entry = unpack(text)
        if entry is None:
            self._say(f"{self.path} is damaged: the write budget begins with nothing")
            return Entry(self._rate, self._burst, 0.0, now, 0.0, now)
        return entry

    def _compare(self, entry: Entry) -> None:
        if not math.isclose(entry.rate, self._rate, rel_tol=1e-6):
            self._say(
                f"engines that share {self.root} have different write budgets, or it was changed: "
                "write the same in all stacks"
            )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)


def pack(entry: Entry) -> bytes:
    """The bytes of the file."""
    text = _RECORD.pack(_MAGIC, *msgspec.structs.astuple(entry))
    return text + _SUM.pack(xxhash.xxh3_64_intdigest(text))


def unpack(text: bytes) -> Entry | None:
    """What they say; None if they are not what `pack` makes."""
    if len(text) != _BYTES:
        return None
    (digest,) = _SUM.unpack(text[_RECORD.size :])
    magic, *numbers = _RECORD.unpack(text[: _RECORD.size])
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(text[: _RECORD.size]) != digest:
        return None
    if not all(math.isfinite(number) and abs(number) <= _NUMBER_MAX for number in numbers):
        return None
    entry = Entry(*numbers)
    if min(entry.rate, entry.burst, entry.written) < 0 or entry.level > entry.burst:
        return None
    return entry


def read_entry(path: Path) -> Entry | None:
    """What the file says, without its lock; None if there is none that can be read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return unpack(os.pread(fd, _BYTES + 1, 0))
        finally:
            os.close(fd)
    return None
