"""What a copier is asked and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import msgspec

from kvtier.device.layout import DeviceBlocks
from kvtier.interfaces.mover import TransferKind
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
    kind: TransferKind
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


class DeviceCopier(ABC):
    """Moves records between device and host memory, in its own threads; loads before stores.

    `submit` returns at once. Loads copy each record as it arrives, verified; a store is complete
    when every record is sealed. Only bytes whose entry, header and checksum prove them reach the
    device as OK; a load that fails may leave others in the blocks that it was to fill.
    """

    reads_files: bool = False
    """Whether jobs may name files now."""
    pinned: bool = True
    """Whether host memory is pinned for the device by now, as far as that is to be had."""

    @abstractmethod
    def submit(self, job: CopyJob, mark: object = None) -> None:
        """Queue a job, ordered after what the engine has given its device to do so far, or had
        when `mark` was taken."""

    def mark(self) -> object:
        """How far the engine has come in what it gives its device to do."""
        return None

    def make_ready(self, seconds: float) -> bool:
        """Wait until copies are as fast as an engine's start should wait for, but no longer than
        this; whether they are."""
        return True

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """Jobs that ended since the last call; never blocks."""

    @abstractmethod
    def give_up(self, id: int) -> None:
        """Wait no longer for those records of a load that have not arrived: they are CANCELLED;
        and of a store copy no more than what is under way: the rest is DROPPED."""

    @abstractmethod
    def wait(self, ids: Collection[int]) -> None:
        """Sleep until these jobs no longer touch device blocks; loads until their deadline. Not for
        ever: what a device that hangs still touches after that is DROPPED when it ends."""

    @abstractmethod
    def close(self) -> None:
        """End what runs, cancel the rest, release everything; what hangs is left as it is."""
