"""A slab's two files: who owns them, and how long they are."""

from __future__ import annotations

import msgspec

from kvtier.core.slab.layout import SlabHeader

NOBODY = 0
"""The owner of a slab that was let go of, so that others adopt it."""


class SlabFile(msgspec.Struct, frozen=True):
    """A slab as it lies in the folder."""

    header: SlabHeader
    owner: int

    @property
    def id(self) -> int:
        return self.header.slab_id


def file_sizes(header: SlabHeader) -> tuple[int, int]:
    return header.data_end, header.table_bytes
