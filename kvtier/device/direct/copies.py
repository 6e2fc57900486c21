"""The direct rows of loads: from files into staging buffers, proved, and into place on the device.

One thread has as many reads under way as there are buffers. The copies from a buffer to the pages
take no time beside the read, so it waits for them itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvtier.core.system.abandonable_calls import Attempt
from kvtier.device.accelerator import Accelerator
from kvtier.device.copy_plan import Pieces, describe
from kvtier.device.direct.loader import DirectLoader, DirectRead, Landing, Reading
from kvtier.device.job_batches import Batch, Work
from kvtier.device.job_queue import JobQueue
from kvtier.device.layout import DeviceLayout
from kvtier.types import Outcome

logger = logging.getLogger(__name__)

_STRIKES = 3
"""Loads that fail in a row, none of them for a record's sake, before others go another way. One
that is late, or meets a bad disk, has many reads under way, which all fail."""


class _UnderWay(NamedTuple):
    batch: Batch
    reading: Reading


class DirectPath:
    """Reads what the loads of a job queue have in files. `run` is for a thread of its own."""

    def __init__(
        self,
        layout: DeviceLayout,
        device: Accelerator,
        job_queue: JobQueue,
        open_loader: Callable[[], DirectLoader | None],
    ) -> None:
        self.able = False
        """Whether it pays to name files in jobs now; those that do are tried in any case."""
        self.opening = True
        """Whether it is not known yet, which may take long."""
        self._layout = layout
        self._lane = device.lane(urgent=True)
        self._job_queue = job_queue
        self._open = open_loader
        self._loader: DirectLoader | None = None
        self._failures = 0
        self._failed: Work | None = None
        """The last load that did."""
        self._stopped = False

    def stop(self) -> None:
        """Wait for no read any longer."""
        self._stopped = True
        if self._loader is not None:
            self._loader.stop()

    def run(self) -> None:
        """Serve until the job queue closes."""
        with Attempt("files are not read straight into the device"):
            self._loader = self._open()
        self.able = self._loader is not None
        self.opening = False
        if self._stopped:
            self.stop()
        under_way: deque[_UnderWay] = deque()
        while self._refill(under_way):
            one = under_way.popleft()
            with self._job_queue.moving(one.batch):
                self._finish(one)
        if self._loader is not None:
            self._loader.close()

    def _refill(self, under_way: deque[_UnderWay]) -> bool:
        """Begin reads while there are buffers; False at the end."""
        loader = self._loader
        while loader is None or loader.free or not under_way:
            batch = self._job_queue.next(self._job_queue.read, wait=not under_way)
            if batch is None:
                break
            if loader is None or not loader.free:
                # No read can end any more, or none could ever begin.
                self._judge(batch.work, Outcome.IO_ERROR)
                self._job_queue.finish(batch, [Outcome.DROPPED])
                continue
            job, (row,) = batch.work.job, batch.rows
            read = DirectRead(job.files[row], job.keys[row], batch.work.groups[row])
            with self._job_queue.moving(batch):
                under_way.append(_UnderWay(batch, loader.begin(read)))
        return bool(under_way)

    def _finish(self, one: _UnderWay) -> None:
        assert self._loader is not None
        landing = self._loader.end(one.reading, one.batch.work.job.deadline)
        outcome = landing.outcome
        if landing.stage is not None:
            outcome = self._place(one.batch, landing)
            self._loader.give_back(landing.stage)
        self._judge(one.batch.work, outcome)
        self._job_queue.finish(one.batch, [outcome])

    def _place(self, batch: Batch, landing: Landing) -> Outcome:
        """Copy a proved record from its buffer to its pages."""
        work = batch.work
        held, whole = None, False
        with Attempt(f"the device refused {work.what}"):
            pieces = Pieces(*(column[batch.rows] for column in work.pieces))
            records = np.array([landing.record], np.int64)
            copies = describe(self._layout, work.job.blocks, pieces, records)
            self._lane.after(work.mark)
            held = self._lane.to_device(copies)
            whole = True
        outcome = Outcome.IO_ERROR
        with Attempt(f"the device failed {work.what}"):
            self._lane.record().synchronize()  # in any case: a part of the copies may be queued
            outcome = Outcome.OK if whole else Outcome.IO_ERROR
        del held
        return outcome

    def _judge(self, load: Work, outcome: Outcome) -> None:
        """Go another way once direct reads fail for no fault of their records."""
        if outcome in (Outcome.IO_ERROR, Outcome.TIMEOUT):
            self._failures += load is not self._failed
            self._failed = load
        elif outcome.ok:
            self._failures, self._failed = 0, None
        if self.able and self._failures >= _STRIKES:
            self.able = False
            logger.warning(
                "direct reads failed in %d loads in a row: loads go through pinned memory until "
                "the engine is started again",
                self._failures,
            )
