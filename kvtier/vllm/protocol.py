"""What the scheduler's side and the workers' side of one engine tell each other.

The classes here are pickled by vLLM on their way between its own processes, never by kvtier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.types import BlockKey, FilePlace, Outcome

NO_SLOT = -1
"""In place of a slot: the block could not be taken in, and the load must fail."""


@dataclass
class RecordGeometry:
    """What a worker must know of the namespace."""

    digest: bytes
    group_bytes: tuple[int, ...]
    parts: int


@dataclass
class WorkerJob:
    """Records to move between the device and the region; `number` names it in the reports."""

    number: int
    region: str
    geometry: RecordGeometry
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    deadline: float
    files: Mapping[int, FilePlace] = field(default_factory=dict)
    """Where those lie that have no slot, and go from there straight into the device, by position
    in the keys. Only for workers that have reported that they can."""

    @classmethod
    def without_slots(cls, keys: Iterable[bytes]) -> WorkerJob:
        """A load that fails on the worker."""
        known = [BlockKey(key) for key in keys]
        return cls(0, "", RecordGeometry(b"", (), 1), known, [NO_SLOT] * len(known), 0.0)


@dataclass
class Report:
    """How a worker job ended, on one rank or on several."""

    ranks: int
    failures: dict[int, Outcome] = field(default_factory=dict)
    """What failed, by position in the worker job's keys."""
    bytes_moved: int = 0
    busy_seconds: float = 0.0
    bytes_read: int = 0
    """The part of `bytes_moved` that came straight from files, which `busy_seconds` leaves out."""
    read_seconds: float = 0.0
    reads_files: bool = True
    """Whether all of these ranks can read files straight into their devices, as things are."""
    pinned: bool = True
    """Whether their devices reach host memory directly now, or as much of it as they ever will."""

    def merge(self, other: Report) -> Report:
        """Both together; of two reasons for the same block, one that blames the block."""
        failures = {**other.failures, **self.failures}
        failures.update(
            (index, outcome)
            for index, outcome in other.failures.items()
            if failures[index] in (Outcome.CANCELLED, Outcome.TIMEOUT)
        )
        return Report(
            self.ranks + other.ranks,
            failures,
            self.bytes_moved + other.bytes_moved,
            max(self.busy_seconds, other.busy_seconds),
            self.bytes_read + other.bytes_read,
            max(self.read_seconds, other.read_seconds),
            self.reads_files and other.reads_files,
            self.pinned and other.pinned,
        )
