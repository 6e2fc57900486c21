"""Aligned buffers for records on their way between two media, neither of which is host memory."""

from __future__ import annotations

import mmap

from kvtier.core.records.record import Buffer

STAGING_BYTES = 64 << 20


class StagingPool:
    """A fixed number of record buffers, aligned to a page. Not locked: its mover's lock guards it.

    The memory is taken from the system only when a buffer is first written to.
    """

    def __init__(self, record_bytes: int, room: int = STAGING_BYTES) -> None:
        self.count = max(2, room // record_bytes)
        region = memoryview(mmap.mmap(-1, self.count * record_bytes))
        self._free: list[Buffer] = [
            region[index * record_bytes : (index + 1) * record_bytes] for index in range(self.count)
        ]

    @property
    def free(self) -> int:
        """How many buffers can be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[Buffer]:
        """Buffers of one batch; the caller has looked at `free`."""
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give(self, buffers: list[Buffer]) -> None:
        """Return what `take` gave."""
        self._free.extend(buffers)
