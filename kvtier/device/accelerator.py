"""What the copier asks of a device with streams; CUDA is one, the tests' fake another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvtier.device.copier import Copies, DeviceLayout, Ints

ERRORS = (
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a region that is gone, a device that fails, or a library that is not as expected raises into
a copier's thread. It fails a batch: a thread that ended would leave the engine waiting for it."""


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Sleep until everything before it has been done; called in the copier's own threads."""


class Lane(Protocol):
    """A stream of the copier's own. What is given to it is done in order, and later."""

    def after(self, event: Any) -> None:
        """Hold what follows until an event of another stream of this device."""

    def to_device(self, copies: Copies) -> object:
        """Queue copies from host memory, in whose place there may be a buffer on the device; keep
        what is returned until they are done."""

    def to_host(self, copies: Copies) -> object:
        """Queue copies to host memory; keep what is returned until they are done."""

    def record(self) -> Event:
        """The point after everything queued so far; raises only if the device is lost."""


class Stage(Protocol):
    """A buffer on the device with a stream of its own; for one thread, one batch at a time.

    It has room for this rank's parts of the records of a batch, which are all of one group, one
    behind the other. What is given to it is done in order, and later; what is given to it is
    copied at once, or returned to be kept until then.
    """

    rows: Sequence[int]
    """How many records of each group there is room for."""

    def gather(self, group: int, ids: Ints) -> None:
        """Queue pages into the buffer: a row of block numbers for each record, -1 for none."""

    def scatter(self, group: int, ids: Ints) -> None:
        """Queue the buffer's pages into their blocks."""

    def fetch(self, group: int, addresses: Ints) -> object:
        """Queue parts from these addresses of host memory into the buffer."""

    def send(self, group: int, addresses: Ints) -> object:
        """Queue the buffer's parts to these addresses of host memory."""

    def digest(self, group: int, rows: int) -> None:
        """Queue the checksums of so many parts."""

    def sums(self, group: int, rows: int) -> list[int]:
        """Those checksums, once an event says that they are there."""

    def record(self) -> Event:
        """The point after everything queued so far; raises only if the device is lost."""


class Accelerator(Protocol):
    """A device whose work is queued."""

    def attach(self) -> None:
        """Make the calling thread able to use the device."""

    def mark(self) -> Event:
        """Where the engine's own stream is now: called on the engine's thread, never waits."""

    def lane(self, *, urgent: bool) -> Lane:
        """A new stream; an urgent one goes before others where the device can tell."""

    def stages(self, layout: DeviceLayout, batch_bytes: int, *, urgent: bool) -> Sequence[Stage]:
        """Buffers, all alike, for batches of so many bytes, or fewer, or of one record. Raises
        RuntimeError where there can be none: records are then copied page by page, and proved by
        the host."""
