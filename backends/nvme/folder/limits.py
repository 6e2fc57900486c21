"""What the settings allow an NVMe folder, in bytes."""

from __future__ import annotations

import msgspec

_SLACK_SHARE = 4
"""This part of a slab is left free above the floor. Who has fallen below the floor gives up a whole
slab: if that were made again at once, it would go for the next little thing that others write."""


class Limits(msgspec.Struct, frozen=True):
    """What the settings allow, in bytes."""

    capacity: int
    free_floor: int
    slot_bytes: int
    slab_bytes: int
    discard: bool = False
    """Whether what is stored is for this process alone."""
    keep_s: float = 0.0
    """How long an idle namespace keeps its share after its last use."""
    grows: bool = True
    """Whether slabs are made; else what is there is only read."""
    write_rate: float | None = None
    """Bytes a second that may be written in the long run; None: as many as come."""


def kept_free(free_floor: int, slab_bytes: int) -> int:
    """What must stay free on the disk when slabs of this size are made."""
    return free_floor + slab_bytes // _SLACK_SHARE
