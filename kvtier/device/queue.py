"""Jobs in, batches out, results back, between the engine and the copier's threads; and the copier
as the engine knows it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.layout import ChunkRows, Ints, cut
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.system.calls import Attempt
from kvtier.types import BlockKey, Outcome, group_of

logger = logging.getLogger(__name__)

CLOSE_S = 20.0
"""The engine's thread waits no longer for a copier's threads to end."""
GIL_KEPT_S = 2e-4
"""For so long the engine's thread keeps the GIL while one of a copier's waits for it. These need it
several times for each batch, and briefly (docs/how_it_works/gpu.md)."""


class Busy:
    """How long something has gone on; what overlaps counts once, and what only waits does not."""

    def __init__(self) -> None:
        self.running = 0
        self.seconds = 0.0
        self._since = 0.0
        self._waiting = 0
        self._lock = threading.Lock()

    def count(self, now: float, running: int = 0, waiting: int = 0) -> None:
        """From now on so many more run, or wait; the time up to now counts if something moved."""
        with self._lock:
            if self.running > self._waiting:
                self.seconds += now - self._since
            self._since = now
            self.running += running
            self._waiting += waiting

    @contextmanager
    def waiting(self, rows: int, clock: Callable[[], float]) -> Iterator[None]:
        """So many of those that run wait meanwhile: for a buffer, or for the engine. The link could
        do other work, so this says nothing of how fast it is."""
        self.count(clock(), waiting=rows)
        try:
            yield
        finally:
            self.count(clock(), waiting=-rows)


class Work:
    """A job under way: what waits, what runs, and what became of the rest; rows are its records."""

    def __init__(self, job: CopyJob, chunks: ChunkRows, mark: Any, now: float) -> None:
        self.job = job
        self.what = f"a {job.kind.value}"
        self.chunks = chunks
        self.mark = mark
        """How far the engine's own work had come when the job was given, as the copier says it."""
        self.reached = False  # that far, as a thread has seen
        self.waiting = deque(row for row in range(len(chunks)) if row not in job.files)
        """Rows with a slot that have not begun; those without are `unread`."""
        self.unread = deque(sorted(job.files))
        self.outcomes = [Outcome.CANCELLED] * len(chunks)
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

    @property
    def loading(self) -> bool:
        """Whether it brings bytes to the device."""
        return self.job.kind is TransferKind.LOAD

    @property
    def ended(self) -> bool:
        """Whether every row has an outcome."""
        return not (self.waiting or self.unread or self.copying.running or self.reading.running)

    @property
    def touching(self) -> bool:
        """Whether some of it touches the device, or still will."""
        return bool(self.holding or (not self.failed and (self.waiting or self.unread)))

    def drop_holes(self) -> None:
        """A record is a whole chunk or nothing. Where a group's blocks are not whole chunks, some
        are missing: that shifts all blocks behind them, and nobody can tell any more which of them
        belong to which key."""
        groups = self.chunks.groups
        holes = np.flatnonzero((self.chunks.ids < 0).any(axis=1))
        partial = {groups[row] for row in holes.tolist()}
        for row in [row for row in self.waiting if groups[row] in partial]:
            self.waiting.remove(row)
            self.outcomes[row] = Outcome.DROPPED

    def give_up(self, outcome: Outcome) -> None:
        """Everything that has not begun ends with this outcome."""
        for rows in (self.waiting, self.unread):
            for row in rows:
                self.outcomes[row] = outcome
            rows.clear()


class CopyBatch(msgspec.Struct, eq=False):
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
        return self.work.chunks.groups[self.rows[0]]

    @property
    def keys(self) -> list[BlockKey]:
        """Their keys."""
        return [self.work.job.keys[row] for row in self.rows]

    @property
    def slots(self) -> list[int]:
        """Their slots."""
        return [self.work.job.slots[row] for row in self.rows]

    @property
    def ids(self) -> Ints:
        """The block at each place of their chunks, in an array of its own."""
        ids: Ints = self.work.chunks.ids[self.rows]
        return ids

    @property
    def busy(self) -> Busy:
        """The clock that runs meanwhile."""
        return self.work.reading if self.from_files else self.work.copying


class JobQueue:
    """Hands out batches of loads whose records have arrived, and of stores; collects outcomes.

    Threads `serve`: they take a batch and `finish` it (and call `released` before that, once the
    batch no longer touches the device). Rows are moved in batches because meeting at a lock costs
    as much as a small record.

    The engine's thread waits for stores alone (`wait`), and not for ever: a device may hang. A load
    is never waited for, and nothing ends it while a thread may still write to its pages: its result
    comes after that, and vLLM gives the blocks of a load to nobody before.
    """

    _POLL_S, _POLL_MAX_S, _POLL_SHARE = 0.001, 0.004, 1 / 32
    """How often records that are still arriving are looked at: they come from another process. Each
    look takes some 30 microseconds, and a load that has taken long may take that share longer."""
    _WRONG_S = 0.5
    """How long a load that has failed by wrong bytes waits at least for the rest, to prove it."""
    _AHEAD = 16
    """How many records of a job that have not arrived are looked at: they come nearly in order."""
    _SHARE_BATCHES = 4
    """A sharer takes no more at once: a load that has failed goes on until its batches end."""
    _WAIT_S = 20.0
    """The engine's thread waits no longer for stores: many times what the largest take."""

    def __init__(
        self,
        records: RankRecords,
        batch_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        reads_files: bool = False,
        sharers: int = 0,
        mark: Callable[[], Any] = lambda: None,
    ) -> None:
        """So many `sharers` are threads that share a load, each of which takes as few batches as
        that allows; without, all batches are small. `mark` says how far the engine has come in what
        it gives its device to do."""
        self._records = records
        self.layout = layout = records.layout
        self._sharers = sharers
        self._reads_files = reads_files
        self.mark = mark
        self.clock = clock
        self._at_once = [max(1, batch_bytes // size) for size in layout.part_bytes]
        self._lock = threading.Lock()
        self._woken = threading.Condition(self._lock)
        self._lookout = threading.Condition(self._lock)
        """Where threads sleep that wait for records of loads; one of them looks out for these."""
        self._looking = False
        self._done = threading.Condition(self._lock)
        self._loads: list[Work] = []
        self._stores: list[Work] = []
        self._results: list[CopyResult] = []
        self._awaited: Collection[int] = ()
        """The jobs that the engine's thread waits for."""
        self.hurry: Callable[[bool], None] = lambda awaited: None
        """Told when the engine's thread begins and ends to wait."""
        self._closing = False
        sys.setswitchinterval(min(sys.getswitchinterval(), GIL_KEPT_S))

    def fit(self, rows: Sequence[int]) -> None:
        """Hand out batches of at most so many rows of each group from now on."""
        with self._lock:
            self._at_once = [min(pair) for pair in zip(self._at_once, rows, strict=True)]

    # -- the engine's side -----------------------------------------------------------------

    def submit(self, job: CopyJob, mark: Any = None) -> None:
        """Queue a job, ordered after what the engine has given its device to do so far, or had
        when `mark` was taken; returns at once. Raises ValueError on one that cannot be."""
        chunks = cut(self.layout, job.blocks)
        if not len(chunks) == len(job.keys) == len(job.slots):
            raise ValueError(f"{len(job.keys)} keys and {len(job.slots)} slots for {len(chunks)}")
        if job.files and (not self._reads_files or max(job.files) >= len(chunks)):
            raise ValueError("the job names files that cannot be read straight into the device")
        groups = [self.layout.key_groups[group] for group in chunks.groups]
        if [group_of(key) for key in job.keys] != groups:
            raise ValueError("the keys are of other groups than the blocks")
        work = Work(job, chunks, self.mark() if mark is None else mark, self.clock())
        if not work.loading:
            work.drop_holes()
        with self._lock:
            if self._closing or self._stuck:
                work.give_up(Outcome.CANCELLED)
            (self._loads if work.loading else self._stores).append(work)
            self._settle(work)
            self._wake()

    def poll(self) -> list[CopyResult]:
        """Jobs that ended since the last call; never blocks."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def give_up(self, id: int) -> None:
        """Cancel a load of which something has not arrived, or not begun to be read. A read that
        has begun is waited for: its buffer is gone for as long as it takes. Drop what has not
        begun of a store."""
        with self._lock:
            for work in [each for each in [*self._loads, *self._stores] if each.job.id == id]:
                if not work.loading:
                    work.give_up(Outcome.DROPPED)
                elif work.unread or self._coming(work):
                    work.give_up(Outcome.CANCELLED)
                self._settle(work)

    def wait(self, ids: Collection[int]) -> None:
        """Sleep until these jobs no longer touch device blocks; loads until their deadline. Not for
        ever: what a device that hangs still touches after that is DROPPED when it ends."""
        with self._lock:
            self._awaited = ids
            self._wake()
            if self._touching(ids):
                self.hurry(True)
                end = self.clock() + (0.0 if self._stuck else self._WAIT_S)
                while self._touching(ids) and (left := end - self.clock()) > 0:
                    self._done.wait(left)
                self._overtake(self._touching(ids))
                self.hurry(False)
            self._awaited = ()

    def _touching(self, ids: Collection[int]) -> list[Work]:
        return [
            work for work in [*self._loads, *self._stores] if work.job.id in ids and work.touching
        ]

    def _overtake(self, late: Iterable[Work]) -> None:
        """The engine goes on, and may write to the pages of these jobs: whatever still touches them
        has failed, even if its threads say otherwise later. The results come no earlier than that:
        until then the slots stay reserved, because a thread may still write to them."""
        for work in late:
            if not self._stuck:
                logger.error(
                    "%s still uses the device after %g s and is given up: nothing is loaded or "
                    "stored until it ends",
                    work.what,
                    self._WAIT_S,
                )
            work.overtaken = True
            work.give_up(Outcome.DROPPED)
            self._settle(work)

    @property
    def _stuck(self) -> bool:
        """Whether something that the engine waited for in vain is still under way."""
        return any(work.overtaken for work in [*self._loads, *self._stores])

    def close(self) -> None:
        """Cancel what has not begun, and send the threads home."""
        with self._lock:
            self._closing = True
            for work in [*self._loads, *self._stores]:
                work.give_up(Outcome.CANCELLED)
                self._settle(work)
            self._wake()

    def _wake(self) -> None:
        self._woken.notify_all()
        self._lookout.notify_all()

    # -- the threads' side -----------------------------------------------------------------

    def next(self, take: Callable[[], CopyBatch | None], *, wait: bool = True) -> CopyBatch | None:
        """A batch that `take` (one of those below) finds; None at the end, and if it finds none
        and is not to wait for one."""
        with self._lock:
            while (batch := self._taken(take)) is None:
                if self._closing or not wait:
                    return None
                self._sleep(take)
            if take == self.load:
                self._lookout.notify()  # somebody else may have to look out now
            batch.busy.count(self.clock(), len(batch.rows))
            batch.work.holding += len(batch.rows)
            return batch

    def serve(
        self, take: Callable[[], CopyBatch | None], move: Callable[[CopyBatch], object]
    ) -> None:
        """The life of a copier's thread: `move` has to finish each batch, or to pass it on."""
        while (batch := self.next(take)) is not None:
            with self.moving(batch):
                move(batch)

    @contextmanager
    def moving(self, batch: CopyBatch) -> Iterator[None]:
        """Meanwhile a thread has a batch to itself. If it raises, the batch has failed: the engine
        waits for its end. By then the device has done whatever it was given (`Attempt`)."""
        with Attempt(f"{batch.work.what} of the engine failed"):
            yield
            return
        self.finish(batch, [Outcome.IO_ERROR] * len(batch.rows))

    def _taken(self, take: Callable[[], CopyBatch | None]) -> CopyBatch | None:
        """Its batch. If it raises, nobody knows for which job: all that waits has failed."""
        with Attempt("nothing can be found that is to be copied"):
            return take()
        for work in [*self._loads, *self._stores]:
            work.give_up(Outcome.IO_ERROR)
            self._settle(work)
        return None

    def _sleep(self, take: Callable[[], CopyBatch | None]) -> None:
        """Until there may be a batch. What arrives is looked for by one thread: each look keeps
        the GIL from the engine's own thread."""
        if take != self.load:
            waits = take == self.store_after_loads and any(work.waiting for work in self._stores)
            self._woken.wait(self._POLL_S if waits else None)
        elif self._looking or not self._loads:
            self._lookout.wait()
        else:
            self._looking = True
            self._lookout.wait(self.pause(self.clock() - self._loads[-1].started))
            self._looking = False

    def pause(self, waited: float) -> float:
        """For how long nobody looks for what arrives of a load that began so long ago."""
        return min(max(self._POLL_S, waited * self._POLL_SHARE), self._POLL_MAX_S)

    def load(self) -> CopyBatch | None:
        """Records that have arrived, of the oldest load that has some."""
        for work in list(self._loads):
            if work.failed:
                self._expire(work)
            if (batch := self._arrived(work)) is not None:
                return batch
            self._expire(work)
        return None

    def read(self) -> CopyBatch | None:
        """One row of the oldest load that has some to be read from files: they are large."""
        for work in self._loads:
            if work.unread:
                return CopyBatch(work, [work.unread.popleft()], from_files=True)
        return None

    def store(self) -> CopyBatch | None:
        """Rows of the oldest store; of one that the engine waits for, if there is one."""
        for work in sorted(self._stores, key=lambda work: work.job.id not in self._awaited):
            if work.waiting:
                return self._batch_of(work, work.waiting, self._at_once)
        return None

    def store_after_loads(self) -> CopyBatch | None:
        """Rows of a store, if no load could use the time, or the engine waits for a store."""
        awaited = any(work.waiting and work.job.id in self._awaited for work in self._stores)
        if not awaited and any(any(True for _ in self._ready(work)) for work in self._loads):
            return None
        return self.store()

    def _expire(self, work: Work) -> None:
        if (work.waiting or work.unread) and self.clock() >= work.deadline:
            work.give_up(Outcome.CANCELLED if work.failed else Outcome.TIMEOUT)
            self._settle(work)

    def reach(self, batch: CopyBatch) -> None:
        """Wait until the engine has done what it had queued when the job was given.

        By this thread, not by a stream: streams share a few queues of the device, where what waits
        holds up what comes behind it, other batches as well as the engine's own work. Once for each
        job, because asking gives the GIL away.
        """
        work = batch.work
        if not work.reached:
            with batch.busy.waiting(len(batch.rows), self.clock):
                work.mark.synchronize()
            work.reached = True

    def released(self, batch: CopyBatch) -> None:
        """The batch no longer touches the device, though its outcome is not known."""
        with self._lock:
            self._release(batch)
            self._tell_waiting(batch.work)

    def _release(self, batch: CopyBatch) -> None:
        if batch.held:
            batch.held, batch.overtaken = False, batch.work.overtaken
            batch.work.holding -= len(batch.rows)

    def _tell_waiting(self, work: Work) -> None:
        """Wake who waits for a job, once for all of its batches: a waiter needs the GIL to look."""
        if not work.touching:
            self._done.notify_all()

    def finish(self, batch: CopyBatch, outcomes: list[Outcome]) -> None:
        """What became of a batch's rows; only the first that is said of a batch counts."""
        work = batch.work
        rows = list(zip(batch.rows, outcomes, self._bytes_of(batch), strict=True))
        with self._lock:
            if batch.ended:
                return
            batch.ended = True
            batch.busy.count(self.clock(), -len(batch.rows))
            self._release(batch)
            for row, outcome, size in rows:
                if batch.overtaken:
                    outcome = Outcome.DROPPED
                work.outcomes[row] = outcome
                if outcome.ok:
                    work.moved += size
                    work.read += size if batch.from_files else 0
                elif work.loading and not work.failed:
                    self._condemn(work, outcome)
            self._tell_waiting(work)
            self._settle(work)

    def _bytes_of(self, batch: CopyBatch) -> list[int]:
        """How many bytes each of its rows moves."""
        page = self.layout.part_bytes[batch.group] // self.layout.blocks_per_chunk
        sizes: list[int] = ((batch.ids >= 0).sum(axis=1) * page).tolist()
        return sizes

    def _condemn(self, work: Work, why: Outcome) -> None:
        """The engine will recompute the whole request. What has arrived is looked at all the same:
        else each bad record of a prompt would cost one more request its load. So is what arrives
        soon, if bytes were wrong: nobody else proves it."""
        coming = self._coming(work)
        if why is Outcome.CORRUPT:
            now = self.clock()
            soon = now + max(self._WRONG_S, now - work.started)
            work.deadline = min(work.deadline, soon)
            coming = set()
        looked_at = [row for row in work.waiting if row not in coming]
        work.give_up(Outcome.CANCELLED)
        if not self._closing:
            work.waiting.extend(looked_at)
        work.failed = True

    def _arrived(self, work: Work) -> CopyBatch | None:
        """The first waiting rows whose records have arrived, or never will, if there are any."""
        at_once = self._at_once
        if self._sharers:
            share = len(work.waiting) // self._sharers
            at_once = [max(rows, min(share, rows * self._SHARE_BATCHES)) for rows in at_once]
        return self._batch_of(work, self._ready(work), at_once)

    def _ready(self, work: Work) -> Iterator[int]:
        """Those rows, until so many have been seen that are still on their way."""
        slots, pending = work.job.slots, self._records.pending
        left = max(self._AHEAD, *self._at_once)
        for row in work.waiting:
            if not pending(slots[row]):
                yield row
            elif (left := left - 1) == 0:
                return

    def _coming(self, work: Work) -> set[int]:
        """All such rows whose records are on their way; every one if nobody can tell."""
        with Attempt(f"{work.what} cannot tell what has arrived"):
            return {row for row in work.waiting if self._records.pending(work.job.slots[row])}
        return set(work.waiting)

    def _batch_of(
        self, work: Work, rows: Iterable[int], at_once: Sequence[int]
    ) -> CopyBatch | None:
        """The first of these waiting rows, as many as are of one group and are handed out at once;
        they wait no longer."""
        batch: list[int] = []
        for row in rows:
            if batch and work.chunks.groups[row] != work.chunks.groups[batch[0]]:
                break
            batch.append(row)
            if len(batch) == at_once[work.chunks.groups[row]]:
                break
        for row in batch:
            work.waiting.remove(row)
        return CopyBatch(work, batch) if batch else None

    def _settle(self, work: Work) -> None:
        """Turn a job that has ended into its result."""
        if not work.ended:
            return
        (self._loads if work.loading else self._stores).remove(work)
        self._results.append(
            CopyResult(
                id=work.job.id,
                outcomes=work.outcomes,
                bytes_moved=work.moved,
                seconds=self.clock() - work.started,
                busy_seconds=work.copying.seconds,
                bytes_read=work.read,
                read_seconds=work.reading.seconds,
            )
        )
        self._done.notify_all()


class DeviceCopier(ABC):
    """Moves records between device and host memory, in its own threads; loads before stores.

    Loads copy each record as it arrives, verified; a store is complete when every record is sealed.
    Only bytes whose entry, header and checksum prove them reach the device as OK; a load that fails
    may leave others in the blocks that it was to fill.
    """

    jobs: JobQueue
    """What the engine's thread calls."""
    reads_files: bool = False
    """Whether jobs may name files now."""
    pinned: bool = True
    """Whether host memory is pinned for the device by now, as far as that is to be had."""

    def make_ready(self, seconds: float) -> bool:
        """Wait until copies are as fast as an engine's start should wait for, but no longer than
        this; whether they are."""
        return True

    @abstractmethod
    def close(self) -> None:
        """End what runs, cancel the rest, release everything; what hangs is left as it is."""
