"""What the scheduler's side and the workers' side of one engine tell each other.

The classes here are pickled by vLLM on their way between its own processes, never by kvtier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.types import BlockKey, Outcome

NO_SLOT = -1
"""In place of a slot: the block could not be taken in, and the load must fail."""


@dataclass
class Geometry:
    """What a worker must know of the namespace."""

    digest: bytes
    group_bytes: tuple[int, ...]
    parts: int


@dataclass
class Errand:
    """Records to move between the device and the region; `number` names it in the reports."""

    number: int
    region: str
    geometry: Geometry
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    deadline: float


@dataclass
class Report:
    """How an errand ended, on one rank or on several."""

    ranks: int
    failures: dict[int, Outcome] = field(default_factory=dict)
    """What failed, by position in the errand's keys."""
    bytes_moved: int = 0
    busy_seconds: float = 0.0

    def merge(self, other: Report) -> Report:
        """Both together; of two reasons for the same block the first is as good."""
        return Report(
            self.ranks + other.ranks,
            {**other.failures, **self.failures},
            self.bytes_moved + other.bytes_moved,
            max(self.busy_seconds, other.busy_seconds),
        )
