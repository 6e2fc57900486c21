"""Entries of a table, written down."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

from kvtier.core.slab import layout
from kvtier.system.disk import Disk
from kvtier.types import BlockKey


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
