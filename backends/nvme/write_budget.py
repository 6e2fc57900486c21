"""How much may be written to a folder on a drive that wears: the ledger, and leases of engines."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import xxhash

from kvtier.chain.admission import SPREAD_S
from kvtier.interfaces.write_budget import BURST_S, TokenBucket, WriteAllowance
from kvtier.record.record import record_bytes
from kvtier.slab.files import folder_locked
from kvtier.slab.folder import SlabFolder
from kvtier.slab.layout import ENTRY_BYTES
from kvtier.system.calls import abandonable
from kvtier.types import BlockKey, Namespace

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


_EVERY_S = 1.0
_PAUSE_S = 0.1
"""Who runs short is served sooner, but no sooner than this."""
_LOOK_S = 5.0
"""Who writes nothing looks so often what is left, because it fills."""
_FIRST_ASK_S, _ASK_DRIVES_S = 10.0, 600.0
_AHEAD_BLOCKS = 8
_AHEAD_S = 10.0
"""At least so many blocks, unless so many seconds do not bring them: of small budgets one block."""
_TOO_MUCH = 4.0


def leases_of(folder: SlabFolder, rate: float, slot_bytes: int) -> Leases:
    """Have what is written to a folder kept within so many bytes a second."""
    block = slot_bytes + _ENTRIES * ENTRY_BYTES
    allowance = WriteAllowance(rate, max(BURST_S * rate, block), block)
    return Leases(WriteLedger(folder.root, rate, allowance.burst), allowance)


class Leases:
    """Keeps an engine's allowance supplied; for its keeper's thread."""

    def __init__(
        self,
        ledger: WriteLedger,
        allowance: WriteAllowance,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self.allowance = allowance
        self._clock = clock
        self._told = 0.0
        self._next = self._next_look = self._not_before = 0.0
        self._next_ask: float | None = None

    @property
    def _ahead(self) -> float:
        """What is held at least."""
        block = self.allowance.block_bytes
        return max(block, min(_AHEAD_BLOCKS * block, _AHEAD_S * self.allowance.rate))

    def begin(self, when_short: Callable[[], None]) -> None:
        """Take the first lease, and have `when_short` called where that does not reach."""
        self.allowance.when_short = when_short
        self.renew(at_once=True)

    def renew(self, *, at_once: bool = False) -> None:
        """Take, or give back, what is due. Raises OSError, or FolderBusy."""
        self._ask_drives_in_turn()
        now, allowance = self._clock(), self.allowance
        if not at_once and now < self._not_before:
            return
        wanted = allowance.take_wanted()
        if not (at_once or wanted or now >= self._next):
            return
        self._next, self._not_before = now + _EVERY_S, now + _PAUSE_S
        total, lease = allowance.spent, allowance.lease
        spent = total - self._told
        target = max(self._ahead, 2 * spent, wanted)
        if lease > _TOO_MUCH * target:
            self._exchange(total, target - lease, now)
        elif at_once or spent or (lease < target and allowance.shared > 0):
            self._exchange(total, max(0.0, target - max(0.0, lease)), now)
        elif now >= self._next_look:
            self._look(now)

    def _exchange(self, total: float, change: float, now: float) -> None:
        allowance = self.allowance
        spent, owed = total - self._told, max(0.0, -allowance.lease)
        granted, entry = self._ledger.exchange(spent, change, owed)
        self._told = total
        allowance.grant(granted + owed)
        allowance.tell(max(0.0, entry.level), entry.written, total)
        self._next_look = now + _LOOK_S

    def _look(self, now: float) -> None:
        entry = self._ledger.look()
        if entry is not None:
            self.allowance.tell(max(0.0, entry.level), entry.written, self._told)
        self._next_look = now + _LOOK_S

    def _ask_drives_in_turn(self) -> None:
        """Have the drives asked now and then what they count, by a thread that may take its time.
        Not at the start: a process that runs for moments only asks nobody."""
        now = self._clock()
        if self._next_ask is None:
            self._next_ask = now + _FIRST_ASK_S
        elif now >= self._next_ask:
            self._next_ask = now + _ASK_DRIVES_S
            with contextlib.suppress(RuntimeError):  # no thread is to be had
                abandonable(self._ask_drives, "kvtier-drives")

    def _ask_drives(self) -> None:
        from kvtier.backends.nvme.drives import read_drives  # not for an engine's start

        drives = read_drives(self._ledger.root)
        written = [drive.written for drive in drives if drive.written is not None]
        if written and len(written) == len(drives):
            used = max(drive.percent_used or 0 for drive in drives) / 100
            self.allowance.tell_drive(float(sum(written)), used)

    def close(self) -> None:
        """Give back what is left. Raises OSError, or FolderBusy."""
        total, lease = self.allowance.spent, self.allowance.lease
        self._exchange(total, min(0.0, -lease), self._clock())


_ENTRIES = 2
"""The handler writes a block's entry before its record, and after it."""


def written_bytes(namespace: Namespace, keys: Iterable[BlockKey]) -> int:
    """What is written when these blocks are stored."""
    return sum(record_bytes(namespace.payload_of(key)) + _ENTRIES * ENTRY_BYTES for key in keys)
