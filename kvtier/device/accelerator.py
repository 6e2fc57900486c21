"""What the copier asks of a device with streams; CUDA is one, the tests' fake another."""

from __future__ import annotations

from typing import Any, Protocol

from kvtier.device.plan import Copies

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
        """Queue copies from host memory; keep what is returned until they are done."""

    def within(self, copies: Copies) -> object:
        """Queue copies whose host side is memory of the device, too; keep what is returned."""

    def to_host(self, copies: Copies) -> object:
        """Queue copies to host memory; keep what is returned until they are done."""

    def record(self) -> Event:
        """The point after everything queued so far."""


class Accelerator(Protocol):
    """A device whose work is queued."""

    def attach(self) -> None:
        """Make the calling thread able to use the device."""

    def mark(self) -> Event:
        """Where the engine's own stream is now: called on the engine's thread, never waits."""

    def lane(self, *, urgent: bool) -> Lane:
        """A new stream; an urgent one goes before others where the device can tell."""
