"""Reads records from files straight into device memory, verifies and places them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from kvtier.device.accelerator import ERRORS, Accelerator, QueuedSteps
from kvtier.device.layout import DeviceLayout, describe
from kvtier.device.queue import CopyBatch, JobQueue, Work
from kvtier.record.record import ALIGN, HEADER_BYTES, Buffer, padded, stated_sum, verify_header
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


class DirectRead(msgspec.Struct, eq=False):
    """A record in a file, and the read of it once that has begun."""

    place: FilePlace
    key: BlockKey
    group: int
    outcome: Outcome | None = None
    """How it ended; None until then."""
    stage: DirectStage | None = None
    """The buffer that it goes to, which holds this rank's part if it ended well."""
    record: int = 0
    """Where the whole record would begin on the device, if all of it lay there."""
    file: DirectFile | None = None
    future: DirectFuture | None = None
    size: int = 0

    def failed(self, error: Exception) -> Outcome:
        """What it is after an error, which the log says."""
        logger.warning("cannot read %s directly: %s", self.place.path, error)
        return Outcome.IO_ERROR


_hanging: list[DirectRead] = []

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
        self._lost: list[DirectRead] = []

    @property
    def free(self) -> int:
        """How many reads can be begun now."""
        self._reap()
        return len(self._free)

    def _reap(self) -> None:
        """Take back the buffers of reads that were given up and have ended since."""
        with Attempt("a direct read cannot tell whether it has ended"):
            for read in [
                each for each in self._lost if each.future is not None and each.future.done()
            ]:
                self._lost.remove(read)
                self._end_of(read)
                self.give_back(read)

    def begin(self, read: DirectRead) -> None:
        """Begin a read; only while there are `free` buffers."""
        header = self._header(read)
        if isinstance(header, Outcome):
            read.outcome = header
            return
        start, stop = self._span(read.group)
        try:
            read.file = self._driver.open(Path(read.place.path))
        except ERRORS as error:
            read.outcome = read.failed(error)
            return
        read.stage, read.size = self._free.pop(), stop - start
        read.record = read.stage.address - start
        try:
            read.future = read.file.pread(read.stage.buffer, read.size, read.place.at + start)
        except ERRORS as error:
            self.give_back(read)
            read.file.close()
            read.outcome = read.failed(error)

    def end(self, read: DirectRead, deadline: float) -> Outcome:
        """Wait for a read; one that is OK keeps its buffer until it is given back."""
        if read.future is None or read.outcome is not None:
            return read.outcome or Outcome.IO_ERROR
        self._lost.append(read)  # until it is seen to have ended, whatever happens meanwhile
        while not read.future.done():
            late = self._clock() >= deadline
            if late or self._stopped:
                read.outcome = Outcome.TIMEOUT if late else Outcome.CANCELLED
                return read.outcome
            self._sleep(0.0002)
        self._lost.remove(read)
        read.outcome = self._end_of(read)
        if read.outcome.ok:
            read.outcome = self._verify(read)
        if not read.outcome.ok:
            self.give_back(read)
        return read.outcome

    def give_back(self, read: DirectRead) -> None:
        """Nothing is copied to or from its buffer any more, which may be used again."""
        if read.stage is not None:
            self._free.append(read.stage)
            read.stage = None

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

    def _end_of(self, read: DirectRead) -> Outcome:
        """Wait for a read, and close its file."""
        assert read.future is not None
        assert read.file is not None
        try:
            count = read.future.get()
        except ERRORS as error:
            return read.failed(error)
        finally:
            read.file.close()
        return Outcome.OK if count == read.size else Outcome.IO_ERROR

    def _verify(self, read: DirectRead) -> Outcome:
        """Header, checksum and payload must agree; a slot that changed meanwhile is just gone."""
        assert read.stage is not None
        header = self._header(read)
        if isinstance(header, Outcome):
            return Outcome.GONE
        layout = self._layout
        size = layout.part_bytes[read.group]
        skip = HEADER_BYTES + layout.part * size - self._span(read.group)[0]
        try:
            found = read.stage.checksum(skip, size)
        except ERRORS as error:
            return read.failed(error)
        return Outcome.OK if found == stated_sum(header, layout.part) else Outcome.CORRUPT

    def _header(self, read: DirectRead) -> Buffer | Outcome:
        """A record's header page, verified to be this key's."""
        page, layout = memoryview(bytearray(HEADER_BYTES)), self._layout
        try:
            fd = self._disk.open(Path(read.place.path))
            try:
                count = self._disk.readv(fd, [page], read.place.at)
            finally:
                self._disk.close(fd)
        except FileNotFoundError:
            return Outcome.GONE
        except OSError as error:
            return read.failed(error)
        if count != HEADER_BYTES:
            return Outcome.GONE
        size = layout.group_bytes[read.group]
        outcome = verify_header(page, read.key, self._namespace, size, layout.parts)
        return page if outcome.ok else outcome

    def _span(self, group: int) -> tuple[int, int]:
        """The aligned bytes of a record in which this rank's part lies."""
        size = self._layout.part_bytes[group]
        start = HEADER_BYTES + self._layout.part * size
        return start // ALIGN * ALIGN, padded(start + size)


_STRIKES = 3
"""Loads that fail in a row, none of them for a record's sake, before others go another way. One
that is late, or meets a bad disk, has many reads under way, which all fail."""


class DirectPath:
    """Reads what the loads of a job queue have in files. `run` is for a thread of its own.

    The thread has as many reads under way as there are buffers. The copies from a buffer to the
    pages take no time beside the read, so it waits for them itself.
    """

    def __init__(
        self,
        device: Accelerator,
        job_queue: JobQueue,
        open_loader: Callable[[], DirectLoader | None],
    ) -> None:
        self.able = False
        """Whether it pays to name files in jobs now; those that do are tried in any case."""
        self.opening = True
        """Whether it is not known yet, which may take long."""
        self._stream = device.stream(urgent=True)
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
        under_way: deque[tuple[CopyBatch, DirectRead]] = deque()
        while self._refill(under_way):
            batch, read = under_way.popleft()
            with self._job_queue.moving(batch):
                self._finish(batch, read)
        if self._loader is not None:
            self._loader.close()

    def _refill(self, under_way: deque[tuple[CopyBatch, DirectRead]]) -> bool:
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
            with self._job_queue.moving(batch):
                read = DirectRead(job.files[row], job.keys[row], batch.group)
                loader.begin(read)
                under_way.append((batch, read))
        return bool(under_way)

    def _finish(self, batch: CopyBatch, read: DirectRead) -> None:
        assert self._loader is not None
        outcome = self._loader.end(read, batch.work.job.deadline)
        if outcome.ok:
            outcome = self._place(batch, read)
            self._loader.give_back(read)
        self._judge(batch.work, outcome)
        self._job_queue.finish(batch, [outcome])

    def _place(self, batch: CopyBatch, read: DirectRead) -> Outcome:
        """Copy a verified record from its buffer to its pages."""

        def copy() -> object:
            records = np.array([read.record], np.int64)
            copies = describe(self._job_queue.layout, batch.group, batch.ids, records)
            return self._stream.to_device(copies)

        steps = (lambda: self._job_queue.reach(batch), copy)
        done = QueuedSteps(batch.work.what, self._stream, *steps).done()
        return Outcome.OK if done else Outcome.IO_ERROR

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
