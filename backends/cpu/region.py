"""A named region of shared memory that outlives the processes that map it.

One file on tmpfs: header page, table, slots. Its owner (an engine's scheduler) holds an exclusive
lock on the `.owner` file beside it; everyone who maps it holds a shared lock on the region itself.
So a new owner can tell whether the workers of a dead one are really gone, and anyone can tell
whether a region is in use at all. The kernel drops both locks with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.cpu import sharing
from kvtier.backends.cpu.region_locks import LOCK_TRY_S, OPEN_FLAGS
from kvtier.errors import FormatError, MediumError
from kvtier.record.record import ALIGN, Buffer, padded
from kvtier.slab.layout import (
    ENTRY_BYTES,
    FLAG_DISCARD,
    SLOTS_MAX,
    TABLE_AT,
    SlabHeader,
    entry_at,
    pinning_order,
    read_entries,
)
from kvtier.system.disk import lock_within

MAKING_SUFFIX = ".making"
KEEP_AT = 136
KEEP = struct.Struct("<I")
"""For how many seconds a region that nobody uses is kept; 0 if its maker died before it said so."""


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
            fd = os.open(path, OPEN_FLAGS)
        except OSError as error:
            raise MediumError(
                f"cannot open the CPU region {path} ({error.strerror}): its engine makes it first"
            ) from error
        try:
            if not lock_within(fd, fcntl.LOCK_SH, LOCK_TRY_S):
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

    def entries_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """The entries of some slots as they stand."""
        found: npt.NDArray[np.void] = read_entries(self.table[:], self.header.slots)[slots]
        return found

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
        KEEP.pack_into(self.table, KEEP_AT, min(max(1, round(seconds)), 0xFFFFFFFF))

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
