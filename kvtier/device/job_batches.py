"""A job under way, and the batches of rows that are cut from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvtier.core.interfaces.mover import TransferKind
from kvtier.core.system.abandonable_calls import Attempt
from kvtier.device.copier import Busy, Job, Prover
from kvtier.device.copy_plan import Ints, Pieces
from kvtier.types import BlockKey, Outcome


class Work:
    """A job under way: what waits, what runs, and what became of the rest; rows are its records."""

    def __init__(self, job: Job, pieces: Pieces, mark: Any, now: float) -> None:
        self.job = job
        self.what = f"a {job.kind.value}"
        self.pieces = pieces
        self.mark = mark
        """How far the engine's own work had come when the job was given, as the copier says it."""
        self.reached = False  # that far, as a thread has seen
        self._places: Ints | None = None
        self.groups: list[int] = pieces.group.tolist()
        self.waiting = deque(row for row in range(len(pieces)) if row not in job.files)
        """Rows with a slot that have not begun; those without are `unread`."""
        self.unread = deque(sorted(job.files))
        self.outcomes = [Outcome.CANCELLED] * len(pieces)
        self.copying, self.reading = Busy(), Busy()
        self.holding = 0  # running rows that still touch the device
        self.overtaken = False
        """The engine has stopped waiting for it, and may write to the pages that it still touches.
        """
        self.failed = False
        """A record of this load was not what it should be: the others are looked at, not copied."""
        self.moved = self.read = 0
        self.started = now
        self.deadline = job.deadline

    def record(self, row: int) -> tuple[BlockKey, int, int]:
        """A row's key, slot and group."""
        return self.job.keys[row], self.job.slots[row], self.groups[row]

    def places(self, rows: Sequence[int], per_chunk: int) -> Ints:
        """The block at each place of these rows' chunks; -1 where a partial one has none."""
        if self._places is None:  # by whichever thread is first: once for all batches
            pieces, ids = self.pieces, self.job.blocks.ids
            place = np.arange(per_chunk) - pieces.skip[:, None]
            inside = (place >= 0) & (place < pieces.length[:, None])
            at = np.where(inside, pieces.at[:, None] + place, 0)
            self._places = np.where(inside, ids[at], -1)
        return self._places[rows]

    @property
    def loading(self) -> bool:
        """Whether it brings bytes to the device."""
        return self.job.kind is TransferKind.LOAD

    @property
    def ended(self) -> bool:
        """Whether every row has an outcome."""
        return not (self.waiting or self.unread or self.copying.running or self.reading.running)

    def give_up(self, outcome: Outcome) -> None:
        """Everything that has not begun ends with this outcome."""
        for rows in (self.waiting, self.unread):
            for row in rows:
                self.outcomes[row] = outcome
            rows.clear()


class Batch(msgspec.Struct, eq=False):
    """Rows of a job that are moved together, all of one group."""

    work: Work
    rows: list[int]
    from_files: bool = False
    held: bool = True
    """It still touches the device."""
    overtaken: bool = False
    """It did when the engine stopped waiting for it."""
    ended: bool = False

    @property
    def group(self) -> int:
        """The group's position in the layout."""
        return self.work.groups[self.rows[0]]

    @property
    def failure(self) -> str:
        """What the log says if a step of it raises."""
        return f"{self.work.what} of the engine failed"

    @property
    def busy(self) -> Busy:
        """The clock that runs meanwhile."""
        return self.work.reading if self.from_files else self.work.copying


def each_row(
    batch: Batch, step: Callable[[Batch, int], Outcome], so_far: Sequence[Outcome] = ()
) -> list[Outcome]:
    """One step for every row, in order; for none that is not good any more, if it is said how the
    rows have fared so far."""
    outcomes, failure = [], batch.failure
    for row, outcome in zip(batch.rows, so_far or [Outcome.OK] * len(batch.rows), strict=True):
        if outcome.ok:
            outcome = Outcome.IO_ERROR
            with Attempt(failure):
                outcome = step(batch, row)
        outcomes.append(outcome)
    return outcomes


def unchanged(prover: Prover, stamps: Mapping[int, bytes], batch: Batch, row: int) -> Outcome:
    """OK if a row's slot still holds the record that it held when these stamps were taken."""
    same = prover.unchanged(batch.work.job.slots[row], stamps[row])
    return Outcome.OK if same else Outcome.GONE


def head(outcomes: list[Outcome], failed: bool) -> list[Outcome]:
    """Cancel rows that are good so far, but come after one that is not: of a load that has failed
    no more is copied."""
    kept = []
    for outcome in outcomes:
        kept.append(Outcome.CANCELLED if failed and outcome.ok else outcome)
        failed = failed or not outcome.ok
    return kept


def failed(outcomes: list[Outcome]) -> list[Outcome]:
    """What becomes of a batch that the device has not moved."""
    return [Outcome.IO_ERROR if outcome.ok else outcome for outcome in outcomes]
