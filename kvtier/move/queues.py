"""Transfers on their way through a mover: how many are admitted, the batches they are cut into, and
the queue in front of each handler."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

import msgspec

from kvtier.interfaces.mover import MoverStats, Transfer, TransferKind
from kvtier.record.record import Buffer
from kvtier.types import Outcome


class TransferCounts:
    """Admission and counters of a mover. Not locked: each mover calls it under its own lock.

    A host tier has no queue: its memory is the buffer of the medium at the other end. Loads are
    counted against loads alone, stores against all, so that stores never crowd loads out.
    Prefetches are counted against loads and each other, and nothing is counted against them.
    """

    def __init__(self, host: Sequence[bool], queue_blocks: Sequence[int] | None) -> None:
        self._host = host
        self._bounds = queue_blocks
        self._in_flight = {kind: [0] * len(host) for kind in TransferKind}
        self._prefetching = [0] * len(host)
        self._stats = MoverStats()

    def lanes(self, transfer: Transfer) -> tuple[int, ...]:
        """The tiers whose handlers this transfer occupies, in the order it does so."""
        if transfer.kind is TransferKind.FIND or self._host[transfer.target]:
            return (transfer.source,)
        if self._host[transfer.source]:
            return (transfer.target,)
        return (transfer.source, transfer.target)

    def admit(self, transfer: Transfer) -> tuple[int, ...]:
        """Take a transfer in, unless a tier would have more in flight than its bound; answers with
        its lanes, none if it is refused.

        Raises ValueError on one that makes no sense: that is the caller's own mistake.
        """
        blocks = len(transfer.keys)
        if not len(transfer.source_spec) == len(transfer.target_spec) == blocks:
            raise ValueError(f"transfer {transfer.id} needs one place at both ends for every key")
        finds = transfer.kind is TransferKind.FIND
        if (transfer.source == transfer.target) is not finds or not (
            0 <= transfer.source < len(self._host) and 0 <= transfer.target < len(self._host)
        ):
            raise ValueError(f"transfer {transfer.id} must go from one tier to another")
        lanes = self.lanes(transfer)
        if self._bounds is not None and any(
            self._waiting(transfer, lane) + blocks > self._bounds[lane] for lane in lanes
        ):
            return ()
        counted = self._counted(transfer)
        for lane in lanes:
            counted[lane] += blocks
        self._stats.in_flight_blocks += blocks
        return lanes

    def release(self, transfer: Transfer, outcomes: Collection[Outcome] = ()) -> None:
        """Take back an admission: the transfer has ended so, or could not be handed on."""
        blocks, counted = len(transfer.keys), self._counted(transfer)
        for lane in self.lanes(transfer):
            counted[lane] -= blocks
        self._stats.in_flight_blocks -= blocks
        self._stats.timeouts += Outcome.TIMEOUT in outcomes

    def hasten(self, transfer: Transfer) -> None:
        """A prefetch is a load from now on, even if that makes more loads than the bound."""
        blocks = len(transfer.keys)
        for lane in self.lanes(transfer):
            self._prefetching[lane] -= blocks
            self._in_flight[transfer.kind][lane] += blocks
        transfer.prefetch = False

    def restarted(self) -> None:
        """Count a start that followed a death."""
        self._stats.restarts += 1

    def stats(self) -> MoverStats:
        """A copy of the counters."""
        return msgspec.structs.replace(self._stats)

    def _counted(self, transfer: Transfer) -> list[int]:
        return self._prefetching if transfer.prefetch else self._in_flight[transfer.kind]

    def _waiting(self, transfer: Transfer, lane: int) -> int:
        loads = self._in_flight[TransferKind.LOAD][lane]
        if transfer.prefetch:
            return loads + self._prefetching[lane]
        if transfer.kind is not TransferKind.STORE:
            return self._in_flight[transfer.kind][lane]
        return loads + self._in_flight[TransferKind.STORE][lane]


class TransferJob:
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
        "staged",
        "submitted",
        "transfer",
    )

    def __init__(
        self, transfer: Transfer, lanes: tuple[int, ...], batch_blocks: int, now: float
    ) -> None:
        self.transfer = transfer
        self.lanes = lanes
        self.staged = len(lanes) == 2
        """Whether it passes through staging buffers, neither end being host memory."""
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
    def ended(self) -> bool:
        """Whether nothing of it is waiting or active."""
        return self.active == 0 and self.next == self.size

    def cut(self, count: int, now: float, verdict: Outcome | None = None) -> TransferBatch:
        """Start the next blocks."""
        start, stop = self.next, self.next + count
        if self.active == 0:
            self.busy_since = now
        self.active += 1
        self.next = stop
        if verdict is not None:
            self.outcomes[start:stop] = [verdict] * count
        return TransferBatch(self, start, stop, verdict)

    def settle(self, now: float) -> None:
        """One of its batches is done."""
        self.active -= 1
        if self.active == 0:
            self.busy_seconds += now - self.busy_since


class TransferBatch:
    """Consecutive blocks of a job that one thread moves in one call; of a staged job in two, first
    from the source into `buffers`, then, when they have `arrived` there, on to the target. With a
    `verdict` they are not moved, but end that way."""

    __slots__ = ("arrived", "buffers", "job", "prefetch", "start", "stop", "verdict")

    def __init__(self, job: TransferJob, start: int, stop: int, verdict: Outcome | None) -> None:
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


class HandlerQueue:
    """The queue in front of one handler. Guarded by the mover's lock, which its condition shares.

    Finds go first, each in one call, and then loads. Batches that have come halfway go before
    stores that have not started, because they hold staging buffers; jobs that need such buffers are
    passed over while there are none. Prefetches go before such stores, too, but on a share of the
    threads only: a load that comes meanwhile finds others idle.
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
        self._prefetches: OrderedDict[int, TransferJob] = OrderedDict()
        self.work = threading.Condition(lock)
        self._idle = 0
        self._staging = staging
        self._arrived: deque[TransferBatch] = deque()
        self._direct: dict[TransferKind, OrderedDict[int, TransferJob]] = {
            kind: OrderedDict() for kind in TransferKind
        }
        self._staged: dict[TransferKind, OrderedDict[int, TransferJob]] = {
            kind: OrderedDict() for kind in TransferKind
        }

    def add(self, job: TransferJob) -> None:
        """Queue a job and wake as many threads as it can use: if it is alone, one a block."""
        self._queue_of(job)[job.transfer.id] = job
        self.wake(job.size)

    def remove(self, job: TransferJob) -> None:
        """Forget a job of which nothing is to start any more."""
        self._queue_of(job).pop(job.transfer.id, None)

    def arrive(self, batch: TransferBatch) -> None:
        """Queue the second half of a staged batch."""
        self._arrived.append(batch)
        self.wake(1)

    def withdraw(self, due: float) -> list[TransferBatch]:
        """Take back the batches that wait for their second half and were to end by then."""
        batches = [each for each in self._arrived if each.job.transfer.deadline <= due]
        for batch in batches:
            self._arrived.remove(batch)
        return batches

    def hasten(self, job: TransferJob) -> None:
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

    def take(self, now: float) -> TransferBatch | None:
        """The next batch that can start, None if there is none."""
        return (
            self._cut_from(self._direct[TransferKind.FIND], now)
            or self._cut_from(self._direct[TransferKind.LOAD], now)
            or self._cut_from(self._staged[TransferKind.LOAD], now)
            or (self._arrived.popleft() if self._arrived else None)
            or self._prefetch(now)
            or self._cut_from(self._direct[TransferKind.STORE], now)
            or self._cut_from(self._staged[TransferKind.STORE], now)
        )

    def _prefetch(self, now: float) -> TransferBatch | None:
        if self._prefetching >= self._prefetch_threads:
            return None
        batch = self._cut_from(self._prefetches, now)
        if batch is not None:
            batch.prefetch = True
            self._prefetching += 1
        return batch

    def _cut_from(self, queue: OrderedDict[int, TransferJob], now: float) -> TransferBatch | None:
        if not queue:
            return None
        job = next(iter(queue.values()))
        rest = job.size - job.next
        if job.transfer.deadline <= now:
            self.remove(job)
            return job.cut(rest, now, Outcome.TIMEOUT)
        # A job that has the lane for itself is spread over all its threads, down to its end.
        count = min(rest, job.batch_blocks)
        if job.transfer.kind is TransferKind.FIND:
            count = rest
        elif len(queue) == 1:
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

    def _queue_of(self, job: TransferJob) -> OrderedDict[int, TransferJob]:
        if job.transfer.prefetch:
            return self._prefetches
        return (self._staged if job.staged else self._direct)[job.transfer.kind]


STAGING_BYTES = 64 << 20


class StagingPool:
    """Buffers for records on their way between two media, neither of which is host memory: a fixed
    number, aligned to a page. Not locked: its mover's lock guards it.

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
