"""What a copier is given and answers, and what it asks of a device: CUDA is one, the tests' fake
another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvtier.device.layout import DeviceBlocks, DeviceLayout, Ints, PageCopies
from kvtier.interfaces.mover import TransferKind
from kvtier.system.calls import Attempt
from kvtier.types import BlockKey, FilePlace, Outcome


class CopyJob(msgspec.Struct, kw_only=True):
    """Records to move between the device and host memory.

    Key `i` is the record in `slots[i]`, of the group that the blocks say. A load may name slots
    whose records are still arriving; `deadline` is a point of `time.monotonic()` at which those
    that have not arrived are given up. Keys whose positions are in `files` have no slot: they are
    read from there straight into the device.
    """

    id: int
    kind: TransferKind
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    blocks: DeviceBlocks
    deadline: float
    files: Mapping[int, FilePlace] = msgspec.field(default_factory=dict)


class CopyResult(msgspec.Struct, kw_only=True):
    """How a job ended, one outcome a key. After it, nothing touches the job's blocks or slots.

    One record that fails fails a load: what had not been copied by then is CANCELLED, unless it has
    arrived and is bad, too. If its bytes were wrong, others are waited for a little, to find out.
    """

    id: int
    outcomes: list[Outcome]
    bytes_moved: int
    seconds: float
    """From submission to the end."""
    busy_seconds: float
    """The part of it in which bytes moved: what the cost model wants to know of the device link."""
    bytes_read: int = 0
    """The part of `bytes_moved` that came straight from files, which `busy_seconds` leaves out."""
    read_seconds: float = 0.0
    """How long that took."""

    @property
    def ok(self) -> bool:
        """Whether every record made it."""
        return all(outcome.ok for outcome in self.outcomes)


# -- what the copier asks of a device with streams -------------------------------------------------


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


class StreamEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Sleep until everything before it has been done; called in the copier's own threads."""


class Recording(Protocol):
    """A stream. What is given to it is done in order, and later."""

    def record(self) -> StreamEvent:
        """The point after everything queued so far; raises only if the device is lost."""


class CopyStream(Recording, Protocol):
    """A stream of the copier's own."""

    def to_device(self, copies: PageCopies) -> object:
        """Queue copies from host memory, in whose place there may be a buffer on the device; keep
        what is returned until they are done."""

    def to_host(self, copies: PageCopies) -> object:
        """Queue copies to host memory; keep what is returned until they are done."""


class Stage(Recording, Protocol):
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


class Accelerator(Protocol):
    """A device whose work is queued."""

    def attach(self) -> None:
        """Make the calling thread able to use the device."""

    def mark(self) -> StreamEvent:
        """Where the engine's own stream is now: called on the engine's thread, never waits."""

    def stream(self, *, urgent: bool) -> CopyStream:
        """A new stream; an urgent one goes before others where the device can tell."""

    def stages(self, layout: DeviceLayout, batch_bytes: int, *, urgent: bool) -> Sequence[Stage]:
        """Buffers, all alike, for batches of so many bytes, or fewer, or of one record. Raises
        RuntimeError where there can be none: records are then copied page by page, and verified
        by the host."""


class QueuedSteps:
    """Steps of a batch that were given to a stream, and the event behind them."""

    def __init__(self, what: str, stream: Recording, *steps: Callable[[], object]) -> None:
        self._failure = f"the device failed {what}"
        self._event: StreamEvent | None = None
        self._held: list[object] = []
        """What must live until the event."""
        self.whole = False
        """Whether the stream took all of them."""
        with Attempt(f"the device refused {what}"):
            for step in steps:
                self._held.append(step())
            self.whole = True
        with Attempt(self._failure):
            self._event = stream.record()  # in any case: a part of them may be queued

    def done(self) -> bool:
        """Wait until the device has done what it took; whether that is all of it."""
        with Attempt(self._failure):
            if self._event is not None:
                self._event.synchronize()
                return self.whole
        return False
