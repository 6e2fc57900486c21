"""['kvtier/move/queues.py', 'kvtier/move/queues.py']"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict, deque

from kvtier.interfaces.mover import Transfer, TransferKind
from kvtier.record.record import Buffer
from kvtier.types import Outcome


class Job:
    """A transfer on its way: what of it has not started, what is active, and how blocks ended."""

    __slots__ = (
        "active",
        "batch_blocks",
        "busy_seconds",
        "busy_since",
        "lanes",
        "next",
        "outcomes",
        "size",
        "submitted",
        "transfer",
    )

    def __init__(
        self, transfer: Transfer, lanes: tuple[int, ...], batch_blocks: int, now: float
    ) -> None:
        self.transfer = transfer
        self.lanes = lanes
        self.batch_blocks = batch_blocks
        self.size = len(transfer.keys)
        self.next = 0
        self.active = 0
        # What a block is until its handler has said otherwise, so that a handler which raises
        # halfway leaves the truth behind.
        self.outcomes = [Outcome.IO_ERROR] * self.size
        self.submitted = now
        self.busy_since = now
        self.busy_seconds = 0.0

    @property
    def staged(self) -> bool:
        """Whether it passes through staging buffers, neither end being host memory."""
        return len(self.lanes) == 2

    @property
    def ended(self) -> bool:
        """Whether nothing of it is waiting or active."""
        return self.active == 0 and self.next == self.size

    def cut(self, count: int, now: float, verdict: Outcome | None = None) -> Batch:
        """Start the next blocks."""
        start, stop = self.next, self.next + count
        if self.active == 0:
            self.busy_since = now
        self.active += 1
        self.next = stop
        if verdict is not None:
            self.outcomes[start:stop] = [verdict] * count
        return Batch(self, start, stop, verdict)

    def settle(self, now: float) -> None:
        """One of its batches is done."""
        self.active -= 1
        if self.active == 0:
            self.busy_seconds += now - self.busy_since


class Batch:
    """Consecutive blocks of a job that one thread moves in one call; of a staged job in two, first
    from the source into `buffers`, then, when they have `arrived` there, on to the target. With a
    `verdict` they are not moved, but end that way."""

    __slots__ = ("arrived", "buffers", "job", "prefetch", "start", "stop", "verdict")

    def __init__(self, job: Job, start: int, stop: int, verdict: Outcome | None) -> None:
        self.job = job
        self.start = start
        self.stop = stop
        self.verdict = verdict
        self.buffers: list[Buffer] = []
        self.arrived = False
        self.prefetch = False
        """Counted by its lane among the prefetches that are active."""

    def moved(self) -> list[tuple[int, int]]:
        """The runs of blocks that are OK so far, as ranges within the batch."""
        runs: list[tuple[int, int]] = []
        for index in range(self.stop - self.start):
            if self.job.outcomes[self.start + index] is not Outcome.OK:
                continue
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return runs

    def spoil(self, outcome: Outcome) -> None:
        """Blocks that are OK so far get this outcome: they have come halfway and no further."""
        for start, stop in self.moved():
            self.job.outcomes[self.start + start : self.start + stop] = [outcome] * (stop - start)


class Lane:
    """The queue in front of one handler. Guarded by the mover's lock, which its condition shares.

    Loads go first. Batches that have come halfway go before stores that have not started, because
    they hold staging buffers; jobs that need such buffers are passed over while there are none.
    Prefetches go before such stores, too, but on a share of the threads only: a load that comes
    meanwhile finds others idle.
    """

    def __init__(
        self,
        lock: threading.Lock,
        concurrency: int,
        batch_blocks: int,
        staging: StagingPool,
        prefetch_share: float = 0.5,
    ) -> None:
        self.concurrency = concurrency
        self.batch_blocks = batch_blocks
        self._prefetch_threads = max(1, int(concurrency * prefetch_share))
        self._prefetching = 0
        self._prefetches: OrderedDict[int, Job] = OrderedDict()
        self.work = threading.Condition(lock)
        self._idle = 0
        self._staging = staging
        self._arrived: deque[Batch] = deque()
        self._direct: dict[TransferKind, OrderedDict[int, Job]] = {
            kind: OrderedDict() for kind in TransferKind
        }
        self._staged: dict[TransferKind, OrderedDict[int, Job]] = {
            kind: OrderedDict() for kind in TransferKind
        }

    def add(self, job: Job) -> None:
        """Queue a job and wake as many threads as it can use: if it is alone, one a block."""
        self._queue_of(job)[job.transfer.id] = job
        self.wake(job.size)

    def remove(self, job: Job) -> None:
        """Forget a job of which nothing is to start any more."""
        self._queue_of(job).pop(job.transfer.id, None)

    def arrive(self, batch: Batch) -> None:
        """Queue the second half of a staged batch."""
        self._arrived.append(batch)
        self.wake(1)

    def withdraw(self, due: float) -> list[Batch]:
        """Take back the batches that wait for their second half and were to end by then."""
        batches = [each for each in self._arrived if each.job.transfer.deadline <= due]
        for batch in batches:
            self._arrived.remove(batch)
        return batches

    def hasten(self, job: Job) -> None:
        """Queue a prefetch, of which something has not started yet, among the loads."""
        if self._prefetches.pop(job.transfer.id, None) is not None:
            self._direct[TransferKind.LOAD][job.transfer.id] = job
            self.wake(job.size - job.next)

    def prefetched(self) -> None:
        """A batch of a prefetch has been run; the thread that ran it asks for the next one."""
        self._prefetching -= 1

    def staging_freed(self) -> None:
        """Buffers have come back: somebody may go on who was passed over."""
        if any(self._staged.values()):
            self.wake(1)

    def wake(self, threads: int) -> None:
        """Wake up to so many idle threads."""
        if self._idle:
            self.work.notify(threads)

    def sleep(self) -> None:
        """Wait, as one of this lane's threads, for work."""
        self._idle += 1
        self.work.wait()
        self._idle -= 1

    def take(self, now: float) -> Batch | None:
        """The next batch that can start, None if there is none."""
        return (
            self._cut_from(self._direct[TransferKind.LOAD], now)
            or self._cut_from(self._staged[TransferKind.LOAD], now)
            or (self._arrived.popleft() if self._arrived else None)
            or self._prefetch(now)
            or self._cut_from(self._direct[TransferKind.STORE], now)
            or self._cut_from(self._staged[TransferKind.STORE], now)
        )

    def _prefetch(self, now: float) -> Batch | None:
        if self._prefetching >= self._prefetch_threads:
            return None
        batch = self._cut_from(self._prefetches, now)
        if batch is not None:
            batch.prefetch = True
            self._prefetching += 1
        return batch

    def _cut_from(self, queue: OrderedDict[int, Job], now: float) -> Batch | None:
        if not queue:
            return None
        job = next(iter(queue.values()))
        rest = job.size - job.next
        if job.transfer.deadline <= now:
            self.remove(job)
            return job.cut(rest, now, Outcome.TIMEOUT)
        # A job that has the lane for itself is spread over all its threads, down to its end.
        count = min(rest, job.batch_blocks)
        if len(queue) == 1:
            count = min(count, -(-rest // self.concurrency))
        if job.staged:
            count = min(count, self._staging.free)
            if not count:
                return None
        if count == rest:
            self.remove(job)
        batch = job.cut(count, now)
        if job.staged:
            batch.buffers = self._staging.take(count)
        return batch

    def _queue_of(self, job: Job) -> OrderedDict[int, Job]:
        if job.transfer.prefetch:
            return self._prefetches
        return (self._staged if job.staged else self._direct)[job.transfer.kind]


# Aligned buffers for records on their way between two media, neither of which is host memory.

STAGING_BYTES = 64 << 20


class StagingPool:
    """A fixed number of record buffers, aligned to a page. Not locked: its mover's lock guards it.

    The memory is taken from the system only when a buffer is first written to.
    """

    def __init__(self, record_bytes: int, room: int = STAGING_BYTES) -> None:
        self.count = max(2, room // record_bytes)
        region = memoryview(mmap.mmap(-1, self.count * record_bytes))
        self._free: list[Buffer] = [
            region[index * record_bytes : (index + 1) * record_bytes] for index in range(self.count)
        ]

    @property
    def free(self) -> int:
        """How many buffers can be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[Buffer]:
        """Buffers of one batch; the caller has looked at `free`."""
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give(self, buffers: list[Buffer]) -> None:
        """Return what `take` gave."""
        self._free.extend(buffers)
