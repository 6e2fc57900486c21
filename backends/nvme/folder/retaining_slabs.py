"""Which slabs of a namespace hold something retained: where whole slabs have to go, they go last.

Whoever decides on that serves another namespace, or none, so it asks the files.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from kvtier.backends.nvme.folder.files import TABLE_BYTES_MAX, list_files, pins_path
from kvtier.core.retained import kept_file
from kvtier.core.slab.layout import ENTRY_BYTES, TABLE_AT, committed, keys_of, read_entries
from kvtier.errors import FormatError
from kvtier.types import BlockKey


def retaining(home: Path, tables: Iterable[Path]) -> set[Path]:
    """Those of a namespace's tables that name a block which engines retain, or people pinned."""
    kept = _kept(home)
    return {table for table in tables if not kept.isdisjoint(_keys(table))} if kept else set()


def _kept(home: Path) -> set[BlockKey]:
    """What lists say that cannot be read is no wish."""
    found: set[BlockKey] = set()
    now = time.time()
    for path in (*list_files(home), pins_path(home)):
        with contextlib.suppress(FormatError, OSError):
            for blocks in kept_file.read(path, bytes.fromhex(home.name)).values():
                found.update(key for key, until in blocks.items() if until > now)
    return found


def _keys(table: Path) -> list[BlockKey]:
    """What a table says is there; nothing, if it cannot be read."""
    with contextlib.suppress(OSError):
        fd = os.open(table, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                text = file.read(TABLE_BYTES_MAX)
                slots = max(0, len(text) - TABLE_AT) // ENTRY_BYTES
                entries = read_entries(text.ljust(TABLE_AT, b"\0"), slots)
                return keys_of(entries[committed(entries)])
    return []
