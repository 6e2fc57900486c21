"""Reads records from files straight into device memory, proves and places them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kvtier.device.accelerator import ERRORS, Accelerator
from kvtier.device.copier import DeviceLayout, Pieces, describe, header_fits
from kvtier.device.queue import Batch, JobQueue, Work
from kvtier.record.record import ALIGN, HEADER_BYTES, Buffer, padded, stated_sum
from kvtier.system.calls import Attempt
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, FilePlace, Outcome

logger = logging.getLogger(__name__)


class DirectFuture(Protocol):
    """A read under way."""

    def done(self) -> bool:
        """Whether `get` would answer at once."""

    def get(self) -> int:
        """Bytes read; raises one of `ERRORS`."""


class DirectFile(Protocol):
    """A file opened for direct reads."""

    def pread(self, buf: object, size: int, file_offset: int) -> DirectFuture:
        """Begin a read into device memory."""

    def close(self) -> None:
        """Close it; no read may be under way."""


class DirectStage(Protocol):
    """A buffer on the device."""

    buffer: object
    address: int

    def checksum(self, skip: int, size: int) -> int:
        """That of its bytes after the first `skip`; raises one of `ERRORS`."""


class DirectDriver(Protocol):
    """What opens files and makes staging buffers."""

    def open(self, path: Path) -> DirectFile:
        """Open a file; raises one of `ERRORS`."""

    def stages(self, count: int, size: int) -> Sequence[DirectStage]:
        """Make staging buffers, at most so many; raises RuntimeError where there is no room."""

    def release(self) -> None:
        """Take back what the driver was told of them; no read may be under way."""


class DirectRead(NamedTuple):
    """A record in a file."""

    place: FilePlace
    key: BlockKey
    group: int


class Landing(NamedTuple):
    """How a read ended; if it is OK, this rank's part lies in `stage`, as if the whole record lay
    at the device address `record`."""

    outcome: Outcome
    stage: DirectStage | None = None
    record: int = 0


class _Flight(NamedTuple):
    future: DirectFuture
    file: DirectFile
    stage: DirectStage
    size: int


class Reading(NamedTuple):
    """A read that was begun; its flight is an outcome if it could not be."""

    read: DirectRead
    flight: _Flight | Outcome


_hanging: list[_Flight] = []

_STAGING_BYTES = 256 << 20
"""The most device memory that buffers take of what the model left."""


class DirectLoader:
    """Reads records through staging buffers. For one thread, which may block."""

    def __init__(
        self,
        layout: DeviceLayout,
        driver: DirectDriver,
        namespace: bytes,
        *,
        stages: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._layout = layout
        self._driver = driver
        self._namespace = namespace
        self._disk = Disk()
        self._clock = clock
        self._sleep = sleep
        self._stopped = False
        size = padded(max(layout.part_bytes)) + ALIGN
        count = stages or max(2, min(16, _STAGING_BYTES // size))
        self._free = list(driver.stages(count, size))
        self._lost: list[_Flight] = []

    @property
    def free(self) -> int:
        """How many reads can be begun now."""
        self._reap()
        return len(self._free)

    def begin(self, read: DirectRead) -> Reading:
        """Begin a read; only while there are `free` buffers."""
        header = self._header(read)
        return Reading(read, header if isinstance(header, Outcome) else self._issue(read))

    def end(self, reading: Reading, deadline: float) -> Landing:
        """Wait for a read; the buffer of one that is OK is handed over."""
        read, flight = reading
        if isinstance(flight, Outcome):
            return Landing(flight)
        self._lost.append(flight)  # until it is seen to have ended, whatever happens meanwhile
        while not flight.future.done():
            late = self._clock() >= deadline
            if late or self._stopped:
                return Landing(Outcome.TIMEOUT if late else Outcome.CANCELLED)
            self._sleep(0.0002)
        self._lost.remove(flight)
        outcome = _end_of(flight)
        if outcome.ok:
            outcome = self._prove(read, flight)
        if not outcome.ok:
            self._free.append(flight.stage)
            return Landing(outcome)
        return Landing(outcome, flight.stage, flight.stage.address - self._span(read.group)[0])

    def give_back(self, stage: DirectStage) -> None:
        """A handed buffer has been copied from, and may be used again."""
        self._free.append(stage)

    def stop(self) -> None:
        """Wait for no read any longer; from any thread."""
        self._stopped = True

    def close(self) -> None:
        """Release the buffers, but for those of reads that hang: they stay until the end."""
        self._reap()
        if not self._lost:
            self._driver.release()
        _hanging.extend(self._lost)
        self._lost.clear()
        self._free.clear()

    def _issue(self, read: DirectRead) -> _Flight | Outcome:
        start, stop = self._span(read.group)
        try:
            file = self._driver.open(Path(read.place.path))
        except ERRORS as error:
            return _io_error(read, error)
        stage = self._free.pop()
        try:
            future = file.pread(stage.buffer, stop - start, read.place.at + start)
        except ERRORS as error:
            self._free.append(stage)
            file.close()
            return _io_error(read, error)
        return _Flight(future, file, stage, stop - start)

    def _prove(self, read: DirectRead, flight: _Flight) -> Outcome:
        """Header, checksum and payload must agree; a slot that changed meanwhile is just gone."""
        header = self._header(read)
        if isinstance(header, Outcome):
            return Outcome.GONE
        layout = self._layout
        size = layout.part_bytes[read.group]
        skip = HEADER_BYTES + layout.part * size - self._span(read.group)[0]
        try:
            found = flight.stage.checksum(skip, size)
        except ERRORS as error:
            return _io_error(read, error)
        return Outcome.OK if found == stated_sum(header, layout.part) else Outcome.CORRUPT

    def _header(self, read: DirectRead) -> Buffer | Outcome:
        """A record's header page, proved to be this key's."""
        page = memoryview(bytearray(HEADER_BYTES))
        try:
            fd = self._disk.open(Path(read.place.path))
            try:
                count = self._disk.readv(fd, [page], read.place.at)
            finally:
                self._disk.close(fd)
        except FileNotFoundError:
            return Outcome.GONE
        except OSError as error:
            return _io_error(read, error)
        if count != HEADER_BYTES:
            return Outcome.GONE
        fits = header_fits(self._layout, self._namespace, page, read.key, read.group)
        return page if fits else Outcome.CORRUPT

    def _span(self, group: int) -> tuple[int, int]:
        """The aligned bytes of a record in which this rank's part lies."""
        size = self._layout.part_bytes[group]
        start = HEADER_BYTES + self._layout.part * size
        return start // ALIGN * ALIGN, padded(start + size)

    def _reap(self) -> None:
        """Take back the buffers of reads that were given up and have ended since."""
        with Attempt("a direct read cannot tell whether it has ended"):
            for flight in [each for each in self._lost if each.future.done()]:
                self._lost.remove(flight)
                _end_of(flight)
                self._free.append(flight.stage)


def _end_of(flight: _Flight) -> Outcome:
    """Wait for a read, and close its file."""
    try:
        count = flight.future.get()
    except ERRORS as error:
        logger.warning("a direct read failed: %s", error)
        return Outcome.IO_ERROR
    finally:
        flight.file.close()
    return Outcome.OK if count == flight.size else Outcome.IO_ERROR


def _io_error(read: DirectRead, error: Exception) -> Outcome:
    logger.warning("cannot read %s directly: %s", read.place.path, error)
    return Outcome.IO_ERROR


# The direct rows of loads: from files into staging buffers, proved, and into place on the device.
#
# One thread has as many reads under way as there are buffers. The copies from a buffer to the
# pages take no time beside the read, so it waits for them itself.

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
