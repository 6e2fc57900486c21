"""The queue between an engine and a copier's threads: jobs in, batches out, results back."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtier.core.system.abandonable_calls import Attempt
from kvtier.device.copier import Job, JobResult, Prover
from kvtier.device.copy_plan import cut
from kvtier.device.job_batches import Batch, Work
from kvtier.device.layout import DeviceLayout
from kvtier.types import Outcome, group_of

logger = logging.getLogger(__name__)

CLOSE_S = 20.0
"""The engine's thread waits no longer for a copier's threads to end."""
LOCK_KEPT_S = 2e-4
"""For so long the engine's thread keeps Python's lock while one of a copier's waits for it. These
need it several times for each batch, and briefly (docs/how_it_works/gpu.md)."""


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
        layout: DeviceLayout,
        prover: Prover,
        batch_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        reads_files: bool = False,
        sharers: int = 0,
    ) -> None:
        """So many `sharers` are threads that share a load, each of which takes as few batches as
        that allows; without, all batches are small."""
        self._layout = layout
        self._sharers = sharers
        self._reads_files = reads_files
        self._prover = prover
        self.clock = clock
        self._block_bytes = [size // layout.blocks_per_chunk for size in layout.part_bytes]
        self._at_once = [max(1, batch_bytes // size) for size in layout.part_bytes]
        self._lock = threading.Lock()
        self._woken = threading.Condition(self._lock)
        self._lookout = threading.Condition(self._lock)
        """Where threads sleep that wait for records of loads; one of them looks out for these."""
        self._looking = False
        self._done = threading.Condition(self._lock)
        self._loads: list[Work] = []
        self._stores: list[Work] = []
        self._results: list[JobResult] = []
        self._awaited: Collection[int] = ()
        """The jobs that the engine's thread waits for."""
        self.hurry: Callable[[bool], None] = lambda awaited: None
        """Told when the engine's thread begins and ends to wait."""
        self._closing = False
        sys.setswitchinterval(min(sys.getswitchinterval(), LOCK_KEPT_S))

    def fit(self, rows: Sequence[int]) -> None:
        """Hand out batches of at most so many rows of each group from now on."""
        with self._lock:
            self._at_once = [min(pair) for pair in zip(self._at_once, rows, strict=True)]

    # -- the engine's side -----------------------------------------------------------------

    def submit(self, job: Job, mark: Any = None) -> None:
        """Queue a job; raises ValueError on one that cannot be."""
        pieces = cut(self._layout, job.blocks)
        if not len(pieces) == len(job.keys) == len(job.slots):
            raise ValueError(f"{len(job.keys)} keys and {len(job.slots)} slots for {len(pieces)}")
        if job.files and (not self._reads_files or max(job.files) >= len(pieces)):
            raise ValueError("the job names files that cannot be read straight into the device")
        work = Work(job, pieces, mark, self.clock())
        groups = [self._layout.key_groups[group] for group in work.groups]
        if [group_of(key) for key in job.keys] != groups:
            raise ValueError("the keys are of other groups than the blocks")
        if not work.loading:
            self._drop_holes(work)
        with self._lock:
            if self._closing or self._stuck:
                work.give_up(Outcome.CANCELLED)
            (self._loads if work.loading else self._stores).append(work)
            self._settle(work)
            self._wake()

    def _drop_holes(self, work: Work) -> None:
        """A record is a whole chunk or nothing. Where a group's blocks are not whole chunks, some
        are missing: that shifts all blocks behind them, and nobody can tell any more which of them
        belong to which key."""
        pieces = work.pieces
        partial = set(pieces.group[pieces.length < self._layout.blocks_per_chunk].tolist())
        for row in [row for row in work.waiting if work.groups[row] in partial]:
            work.waiting.remove(row)
            work.outcomes[row] = Outcome.DROPPED

    def poll(self) -> list[JobResult]:
        """Jobs that ended since the last call."""
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
        """Sleep until these jobs no longer touch the device, or have been given up."""
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
            work
            for work in [*self._loads, *self._stores]
            if work.job.id in ids
            and (work.holding or (not work.failed and (work.waiting or work.unread)))
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

    def next(self, take: Callable[[], Batch | None], *, wait: bool = True) -> Batch | None:
        """A batch that `take` (one of those below) finds; None at the end, and if it finds none
        and is not to wait for one."""
        with self._lock:
            while (batch := self._taken(take)) is None:
                if self._closing or not wait:
                    return None
                self._sleep(take)
            if take == self.load:
                self._lookout.notify()  # somebody else may have to look out now
            batch.busy.begin(len(batch.rows), self.clock())
            batch.work.holding += len(batch.rows)
            return batch

    def serve(self, take: Callable[[], Batch | None], move: Callable[[Batch], object]) -> None:
        """The life of a copier's thread: `move` has to finish each batch, or to pass it on."""
        while (batch := self.next(take)) is not None:
            with self.moving(batch):
                move(batch)

    @contextmanager
    def moving(self, batch: Batch) -> Iterator[None]:
        """Meanwhile a thread has a batch to itself. If it raises, the batch has failed: the engine
        waits for its end. By then the device has done whatever it was given (`Attempt`)."""
        with Attempt(batch.failure):
            yield
            return
        self.finish(batch, [Outcome.IO_ERROR] * len(batch.rows))

    def _taken(self, take: Callable[[], Batch | None]) -> Batch | None:
        """Its batch. If it raises, nobody knows for which job: all that waits has failed."""
        with Attempt("nothing can be found that is to be copied"):
            return take()
        for work in [*self._loads, *self._stores]:
            work.give_up(Outcome.IO_ERROR)
            self._settle(work)
        return None

    def _sleep(self, take: Callable[[], Batch | None]) -> None:
        """Until there may be a batch. What arrives is looked for by one thread: each look is time
        that Python takes from the engine's own thread."""
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

    def load(self) -> Batch | None:
        """Records that have arrived, of the oldest load that has some."""
        for work in list(self._loads):
            if work.failed:
                self._expire(work)
            rows = self._arrived(work)
            if rows:
                for row in rows:
                    work.waiting.remove(row)
                return Batch(work, rows)
            self._expire(work)
        return None

    def read(self) -> Batch | None:
        """One row of the oldest load that has some to be read from files: they are large."""
        for work in self._loads:
            if work.unread:
                return Batch(work, [work.unread.popleft()], from_files=True)
        return None

    def store(self) -> Batch | None:
        """Rows of the oldest store; of one that the engine waits for, if there is one."""
        for work in sorted(self._stores, key=lambda work: work.job.id not in self._awaited):
            if work.waiting:
                rows = self._alike(work, work.waiting, self._at_once)
                for row in rows:
                    work.waiting.remove(row)
                return Batch(work, rows)
        return None

    def store_after_loads(self) -> Batch | None:
        """Rows of a store, if no load could use the time, or the engine waits for a store."""
        awaited = any(work.waiting and work.job.id in self._awaited for work in self._stores)
        if not awaited and any(any(True for _ in self._ready(work)) for work in self._loads):
            return None
        return self.store()

    def _expire(self, work: Work) -> None:
        if (work.waiting or work.unread) and self.clock() >= work.deadline:
            work.give_up(Outcome.CANCELLED if work.failed else Outcome.TIMEOUT)
            self._settle(work)

    def released(self, batch: Batch) -> None:
        """The batch no longer touches the device, though its outcome is not known."""
        with self._lock:
            self._release(batch)

    def _release(self, batch: Batch) -> None:
        if batch.held:
            batch.held, batch.overtaken = False, batch.work.overtaken
            batch.work.holding -= len(batch.rows)
        self._done.notify_all()

    def finish(self, batch: Batch, outcomes: list[Outcome]) -> None:
        """What became of a batch's rows; only the first that is said of a batch counts."""
        work = batch.work
        with self._lock:
            rows = list(zip(batch.rows, outcomes, strict=True))
            if batch.ended:
                return
            batch.ended = True
            batch.busy.end(len(batch.rows), self.clock())
            self._release(batch)
            for row, outcome in rows:
                if batch.overtaken:
                    outcome = Outcome.DROPPED
                work.outcomes[row] = outcome
                if outcome.ok:
                    blocks = int(work.pieces.length[row])
                    size = self._block_bytes[work.groups[row]] * blocks
                    work.moved += size
                    work.read += size if batch.from_files else 0
                elif work.loading and not work.failed:
                    self._condemn(work, outcome)
            self._settle(work)

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

    def _arrived(self, work: Work) -> list[int]:
        """The first waiting rows whose records have arrived, or never will: a batch of them."""
        at_once = self._at_once
        if self._sharers:
            share = len(work.waiting) // self._sharers
            at_once = [max(rows, min(share, rows * self._SHARE_BATCHES)) for rows in at_once]
        return self._alike(work, self._ready(work), at_once)

    def _ready(self, work: Work) -> Iterator[int]:
        """Those rows, until so many have been seen that are still on their way."""
        slots, pending = work.job.slots, self._prover.pending
        left = max(self._AHEAD, *self._at_once)
        for row in work.waiting:
            if not pending(slots[row]):
                yield row
            elif (left := left - 1) == 0:
                return

    def _coming(self, work: Work) -> set[int]:
        """All such rows whose records are on their way; every one if nobody can tell."""
        with Attempt(f"{work.what} cannot tell what has arrived"):
            return {row for row in work.waiting if self._prover.pending(work.job.slots[row])}
        return set(work.waiting)

    def _alike(self, work: Work, rows: Iterable[int], at_once: Sequence[int]) -> list[int]:
        """The first of these, as many as are of one group and are handed out at once."""
        batch: list[int] = []
        for row in rows:
            if batch and work.groups[row] != work.groups[batch[0]]:
                break
            batch.append(row)
            if len(batch) == at_once[work.groups[row]]:
                break
        return batch

    def _settle(self, work: Work) -> None:
        """Turn a job that has ended into its result."""
        if not work.ended:
            return
        (self._loads if work.loading else self._stores).remove(work)
        self._results.append(
            JobResult(
                id=work.job.id,
                kind=work.job.kind,
                outcomes=work.outcomes,
                bytes_moved=work.moved,
                seconds=self.clock() - work.started,
                busy_seconds=work.copying.seconds,
                bytes_read=work.read,
                read_seconds=work.reading.seconds,
            )
        )
        self._done.notify_all()
