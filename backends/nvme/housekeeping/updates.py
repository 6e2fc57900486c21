"""What a keeper tells its tier, and how it finds out what is new."""

from __future__ import annotations

import msgspec
import numpy as np

from kvtier.backends.nvme.folder.slab_file import SlabFile
from kvtier.core.slab import layout
from kvtier.types import BlockKey


class SlabUpdate(msgspec.Struct):
    """Something about a slab that the tier does not know yet."""

    slab: SlabFile
    mine: bool = False
    gone: bool = False
    remove: bool | None = None
    """Whether a slab of ours, which is too much, should be deleted or go to a neighbour."""
    table: bytes | None = None
    """Everything that the slab holds, where it becomes ours with its blocks."""
    changes: tuple[list[int], list[BlockKey]] | None = None
    """What changed in another's slab: slots, and the key of each (empty if it holds none)."""
    written: list[int] | None = None
    """Entries of these slots have been written down."""


def changes(old: bytes, new: bytes, slots: int) -> tuple[list[int], list[BlockKey]]:
    """The slots whose entries differ between two states of a table, with their present keys."""
    entries = layout.read_entries(new, slots)
    held = np.zeros(slots, bool)
    held[layout.committed(entries)] = True
    if len(old) == len(new):
        words = (
            np.frombuffer(table, np.uint64, slots * 8, layout.TABLE_AT) for table in (old, new)
        )
        before, after = (table.reshape(slots, 8) for table in words)
        different = before != after
        different[:, layout.USES_AT // 8] = False  # used, and otherwise the same
        rows = np.flatnonzero(different.any(axis=1))
    else:
        rows = np.flatnonzero(held)
    keys = layout.keys_of(entries[rows])
    here = held[rows].tolist()
    return rows.tolist(), [
        key if present else BlockKey(b"") for key, present in zip(keys, here, strict=True)
    ]
