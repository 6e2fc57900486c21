"""Media of slabs, as an inspector sees them: tables, and blocks as anybody may read them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.errors import FormatError, NewerFormat, describe_error
from kvtier.inspect.contents import Block, Cell, read_file
from kvtier.inspect.filling import ROW, Rows, Source
from kvtier.inspect.inspector import Proof, Prover, Verdict, judge
from kvtier.record.record import Buffer
from kvtier.slab.layout import (
    BAD,
    ENTRY_BYTES,
    ENTRY_DTYPE,
    RESERVED,
    VALID,
    SlabHeader,
    committed,
    entries_in,
    entry_at,
    keys_of,
    runs,
    same_block,
)
from kvtier.types import BlockKey, Outcome


class Slab(msgspec.Struct, kw_only=True):
    """A table and its slots."""

    table: Path
    data: Path
    header: SlabHeader
    in_use: bool
    owner: str
    """The number of its owner's mark."""
    engine: str = ""
    """The name of the engine that has it, where marks tell."""

    @property
    def name(self) -> str:
        """The engine that has it, where marks tell; else as its files are called."""
        return self.engine or self.table.stem

    @property
    def namespace(self) -> str:
        return self.header.namespace.hex()

    @property
    def size(self) -> int:
        """What the slab takes of its medium."""
        return self.header.table_bytes + self.header.slots * self.header.slot_bytes

    def entries(self) -> npt.NDArray[np.void]:
        """The table as it is now; shorter if its file was cut meanwhile, empty if removed."""
        text = b""
        with contextlib.suppress(FileNotFoundError):
            text = read_file(self.table, self.header.table_bytes)
        return entries_in(text, self.header.slots)

    def entry(self, slot: int) -> bytes:
        """One entry as it is now; raises OSError if the table is gone."""
        return read_file(self.table, ENTRY_BYTES, entry_at(slot)).ljust(ENTRY_BYTES, b"\0")

    def holds(self, slot: int, key: BlockKey) -> bool:
        """Whether a slot is committed to this key; raises OSError if the table is gone."""
        return _is_of(self.entry(slot), key)

    def mark_bad(self, blocks: Sequence[SlabBlock]) -> int:
        """Take the slots of these blocks out of use, as far as they still hold them; how many."""
        marked = 0
        fd = os.open(self.table, os.O_RDWR | os.O_CLOEXEC)
        try:
            for block in blocks:
                if self.holds(block.slot, block.key):
                    marked += os.pwrite(fd, bytes([BAD]), entry_at(block.slot))
        finally:
            os.close(fd)
        return marked

    def cells(self, count: int) -> list[Cell]:
        """How full each stretch of slots is, and whether one of it is quarantined."""
        states = self.entries()["state"]
        if not len(states):
            return []
        return [
            Cell(
                1.0 if (cell == RESERVED).all() else float((cell != 0).mean()),
                bool((cell == BAD).any()),
            )
            for cell in np.array_split(states, min(count, len(states)))
        ]


def _is_of(entry: bytes, key: BlockKey) -> bool:
    """Whether an entry says that this block is in its slot."""
    (found,) = keys_of(np.frombuffer(entry, ENTRY_DTYPE))
    return entry[0] == VALID and found == key


class SlabBlock(Block):
    """A block in a slot."""

    slab: Slab
    slot: int

    @property
    def where(self) -> str:
        return f"{self.slab.data}:{self.slot}"


class SlabProver(Prover):
    """Reads slots, and tells a record that is bad from one that is just being replaced."""

    def prove(self, block: Block) -> Verdict:
        assert isinstance(block, SlabBlock)
        slab = block.slab
        try:
            before = slab.entry(block.slot)
            if not _is_of(before, block.key):
                return Verdict(Proof.GONE, "its slot has changed")
            size = slab.header.slot_bytes
            text = read_file(slab.data, size, slab.header.slot_at(block.slot))
            after = slab.entry(block.slot)
        except FileNotFoundError:
            return Verdict(Proof.GONE, "its slab was removed")
        except OSError as error:
            return Verdict(Proof.UNREAD, str(error.strerror))
        if not same_block(before, after):
            return Verdict(Proof.GONE, "its slot was used again meanwhile")
        if len(text) < size:
            return Verdict(Proof.BAD, "the file is cut short")
        return judge(memoryview(text), block)


class SlabSource(Source):
    """The blocks of one slab. `at` is a block's slot."""

    def __init__(self, tier: int, kind: str, slab: Slab) -> None:
        super().__init__(tier, kind)
        self.slab = slab

    def rows(self) -> Rows:
        entries = self.slab.entries()
        slots = committed(entries)
        chosen = entries[slots]
        rows = np.zeros(len(slots), ROW)
        for name in ("key", "key_bytes", "stored_at", "uses", "used_at"):
            rows[name] = chosen[name]
        rows["at"] = slots
        rows["bytes"] = self.slab.header.slot_bytes
        return rows

    def used_again(self, at: int, key: BlockKey) -> bool:
        try:
            return not self.slab.holds(at, key)
        except OSError:
            return True  # the whole slab is gone

    def read(
        self, at: Sequence[int], keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        """Neighbours by one call; opened each time, because slabs come and go."""
        try:
            return self._read(at, into, os.O_DIRECT)
        except FileNotFoundError:
            return [Outcome.GONE] * len(at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return [Outcome.IO_ERROR] * len(at)
        try:  # not every file system can go around its cache
            return self._read(at, into, 0)
        except OSError:
            return [Outcome.IO_ERROR] * len(at)

    def _read(self, slots: Sequence[int], into: Sequence[Buffer], flags: int) -> list[Outcome]:
        size = self.slab.header.slot_bytes
        if any(len(buffer) != size for buffer in into):
            return [Outcome.CORRUPT] * len(slots)
        fd = os.open(self.slab.data, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return [Outcome.CORRUPT] * len(slots)
            outcomes = []
            for start, stop in runs(slots):
                at = self.slab.header.slot_at(slots[start])
                count = os.preadv(fd, into[start:stop], at)
                whole = min(stop - start, count // size)
                outcomes += [Outcome.OK] * whole + [Outcome.CORRUPT] * (stop - start - whole)
            return outcomes
        finally:
            os.close(fd)


_NO_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""What is there is no file of ours; all else says that a file cannot be read just now."""


def trouble(path: Path, error: FormatError | OSError) -> str:
    """Why something on a medium of slabs could not be looked at, and what to do."""
    if isinstance(error, NewerFormat):
        return f"{path}: {error}; it is left alone: update kvtier to read it"
    if isinstance(error, FormatError):
        return f"{path}: {error}; kvtier verify --repair removes it"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path}: {error.strerror}; run this as its owner"
    if isinstance(error, FileNotFoundError):
        return f"{path} has no namespace.json; it is left alone: remove it if it is nobody's"
    if error.errno in _NO_FILE:
        return f"{path}: {error.strerror}; it is left alone: remove it if it is nobody's"
    return describe_error(error)
