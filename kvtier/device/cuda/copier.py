"""The copier for KV tensors on a device with streams.

Where the device has buffers for it, batches go by way of them, and are verified there. Otherwise
they go page by page. Nobody waits for the whole device, and no page costs Python time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from kvtier.device.copier import (
    ERRORS,
    Accelerator,
    CopyStream,
    QueuedSteps,
    Stage,
)
from kvtier.device.direct import DirectLoader, DirectPath
from kvtier.device.layout import Ints, describe
from kvtier.device.pacing import EngineSteps, StorePace
from kvtier.device.pinned import PinnedMemory
from kvtier.device.queue import CLOSE_S, CopyBatch, DeviceCopier, JobQueue
from kvtier.device.records import Flags, RankRecords, up_to_wrong
from kvtier.system.calls import Attempt, joined
from kvtier.types import Outcome

STORES_SHARE = 0.4
"""The part of the time for which stores may be on the link while loads are on it. Loads lose up to
a fifth while something crosses it the other way, and are to lose less than 10 %."""
STORES_AT_ONCE = 2
"""Stores that may be on the link together. What the engine itself copies to the host, like the
tokens of each step, may have to wait for all of them; one alone would leave the link idle for as
long as its thread is late."""


class LinkTurns:
    """Loads before stores: a request waits for them, and a link slows down when used both ways.

    While loads are on the link, stores go there one at a time, and leave it alone in between.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = 1 / STORES_SHARE - 1
        self._room = threading.Semaphore(STORES_AT_ONCE)
        self._store = threading.Lock()
        self._ended = threading.Condition()
        self._loads = 0

    @contextmanager
    def load(self) -> Iterator[None]:
        """Meanwhile a load is on the link."""
        with self._ended:
            self._loads += 1
        try:
            yield
        finally:
            with self._ended:
                self._loads -= 1
                self._ended.notify_all()

    @contextmanager
    def store(self) -> Iterator[None]:
        """Meanwhile a store is on the link, which it may have to wait for."""
        with self._room:
            if not self._loads:
                yield
                return
            with self._store:
                began = self._clock()
                yield
                taken = self._clock() - began
                with self._ended:
                    self._ended.wait_for(lambda: not self._loads, taken * self._pause)


class StagePool:
    """The buffers of one direction; none until they are made, or where they cannot be."""

    def __init__(self) -> None:
        self._rows: Sequence[int] = ()
        self._free: queue.SimpleQueue[Stage] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def use(self, stages: Iterable[Stage]) -> None:
        """Let batches go by way of these from now on."""
        for stage in stages:
            self._free.put(stage)
            self._rows = stage.rows

    def fits(self, batch: CopyBatch) -> bool:
        """Whether a buffer has room for a batch: it may have been cut before they were there."""
        return bool(self) and len(batch.rows) <= self._rows[batch.group]

    @contextmanager
    def stage(self, batch: CopyBatch, clock: Callable[[], float]) -> Iterator[Stage]:
        """The next buffer that is free."""
        with batch.busy.waiting(len(batch.rows), clock):
            stage = self._free.get()
        try:
            yield stage
        finally:
            self._free.put(stage)


class StagedPath:
    """By way of a buffer: the device gathers, scatters and adds up, and a part crosses the link in
    one piece."""

    def __init__(self, records: RankRecords, job_queue: JobQueue, pace: StorePace) -> None:
        self._records = records
        self._job_queue = job_queue
        self._pace = pace
        self._turns = LinkTurns()

    def warm_up(self, stage: Stage) -> None:
        """Do what a load and a store do, of one record, without a page and to no slot: what is done
        for the first time takes many times as long. Raises what the device does."""
        layout = self._records.layout
        none = np.full((1, layout.blocks_per_chunk), -1)
        for group, size in enumerate(layout.part_bytes):
            scratch = np.zeros(size, np.uint8)
            held = [stage.fetch(group, self._records.part_addresses([0], group))]
            stage.digest(group, 1)
            stage.scatter(group, none)
            stage.gather(group, none)
            held.append(stage.send(group, np.array([int(scratch.ctypes.data)])))
            stage.record().synchronize()
            stage.sums(group, 1)

    def load(self, batch: CopyBatch, stage: Stage) -> None:
        """Slots to the buffer; what is verified there goes on to its pages."""
        work, group, ids = batch.work, batch.group, batch.ids
        found = self._records.find(batch.slots, batch.keys, group)
        found = self._records.regrouped(found, group)
        right, rows, moved = found.fit.copy(), np.flatnonzero(found.fit), True
        if len(rows):
            parts = found.parts.only(rows).addresses
            # The kernels wait on the device until the bytes are there: one time less that this
            # thread has to wake up. What they could hold up (`JobQueue.reach`) are other loads
            # alone: these streams are of another urgency than the engine's.
            with self._turns.load():
                moved = QueuedSteps(
                    work.what,
                    stage,
                    lambda: stage.fetch(group, parts),
                    lambda: stage.digest(group, len(rows)),
                ).done()
            if moved:
                sums = np.array(stage.sums(group, len(rows)), np.uint64)
                right[rows] = sums == found.stated[rows]
        copied = up_to_wrong(right, work.failed)
        if moved and copied.any():
            ids[~copied] = -1
            moved = QueuedSteps(
                work.what,
                stage,
                lambda: self._job_queue.reach(batch),
                lambda: stage.scatter(group, ids[rows]),
            ).done()
        self._job_queue.finish(batch, found.outcomes(right, copied, moved))

    def store(self, batch: CopyBatch, stage: Stage) -> None:
        """Pages to the buffer, which is all that the engine waits for, and on to the slots."""
        outcomes, rows = reserved(self._records, batch)
        if len(rows):
            with self._pace.turn():
                sums = self._leave(batch, stage, rows)
            outcomes = sealed(self._records, batch, outcomes, sums)
        self._job_queue.finish(batch, outcomes)

    def _leave(self, batch: CopyBatch, stage: Stage, rows: list[int]) -> list[int] | None:
        """Copy these of a batch's rows; their checksums, None if the device has failed."""
        what, group = batch.work.what, batch.group
        ids, slots = batch.ids[rows], [batch.slots[row] for row in rows]
        gathered = QueuedSteps(
            what,
            stage,
            lambda: self._job_queue.reach(batch),
            lambda: stage.gather(group, ids),
        )
        summed = gathered
        if gathered.whole:
            summed = QueuedSteps(what, stage, lambda: stage.digest(group, len(rows)))
        fine = gathered.done()
        self._job_queue.released(batch)
        if not (summed.done() and fine):
            return None
        parts = self._records.part_addresses(slots, group)
        with self._turns.store():
            if not QueuedSteps(what, stage, lambda: stage.send(group, parts)).done():
                return None
        return stage.sums(group, len(rows))


class PagedPath:
    """Page by page, verified and sealed by the host."""

    def __init__(self, records: RankRecords, job_queue: JobQueue, stream: CopyStream) -> None:
        self._records = records
        self._job_queue = job_queue
        self._stream = stream

    def load(self, batch: CopyBatch) -> None:
        """Slots to pages, once they are verified."""
        found = self._records.find(batch.slots, batch.keys, batch.group)
        found = self._records.regrouped(found, batch.group)
        right = found.verified()
        copied = up_to_wrong(right, batch.work.failed)
        moved = self._copy(batch, copied, found.parts.addresses, self._stream.to_device)
        self._job_queue.finish(batch, found.outcomes(right, copied, moved))

    def store(self, batch: CopyBatch) -> None:
        """Pages to slots."""
        outcomes, rows = reserved(self._records, batch)
        chosen = np.isin(np.arange(len(outcomes)), rows)
        parts = self._records.part_addresses(batch.slots, batch.group)
        moved = self._copy(batch, chosen, parts, self._stream.to_host)
        self._job_queue.released(batch)
        sums = [None] * len(rows) if moved else None
        self._job_queue.finish(batch, sealed(self._records, batch, outcomes, sums))

    def _copy(
        self, batch: CopyBatch, chosen: Flags, parts: Ints, copy: Callable[..., object]
    ) -> bool:
        """Copy these of a batch's rows, whose parts are here; whether all of it was done."""
        if not chosen.any():
            return True
        ids = batch.ids
        ids[~chosen] = -1
        copies = describe(self._records.layout, batch.group, ids, parts)
        return QueuedSteps(
            batch.work.what,
            self._stream,
            lambda: self._job_queue.reach(batch),
            lambda: copy(copies),
        ).done()


def reserved(records: RankRecords, batch: CopyBatch) -> tuple[list[Outcome], list[int]]:
    """Which rows of a store have slots that wait for them; the positions of those."""
    slots = zip(batch.slots, batch.keys, strict=True)
    outcomes = [records.reserved(slot, key) for slot, key in slots]
    return outcomes, [row for row, outcome in enumerate(outcomes) if outcome.ok]


def sealed(
    records: RankRecords,
    batch: CopyBatch,
    outcomes: list[Outcome],
    sums: Sequence[int | None] | None,
) -> list[Outcome]:
    """Seal those rows of a store that are OK so far, whose checksums these are as far as they are
    known; without, the device has not moved them."""
    if sums is None:
        return [Outcome.IO_ERROR if outcome.ok else outcome for outcome in outcomes]
    left, slots, keys = iter(sums), batch.slots, batch.keys
    return [
        records.seal(slots[row], keys[row], batch.group, next(left)) if outcome.ok else outcome
        for row, outcome in enumerate(outcomes)
    ]


logger = logging.getLogger(__name__)


class CudaCopier(DeviceCopier):
    """Moves records through a device's streams, both directions at once."""

    _BATCH_BYTES = 64 << 20
    _THREADS = 4
    """For each direction."""

    def __init__(
        self,
        records: RankRecords,
        device: Accelerator,
        *,
        memory: PinnedMemory | None = None,
        open_direct: Callable[[], DirectLoader | None] | None = None,
        steps: EngineSteps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._device = device
        self._memory = memory
        reads_files = open_direct is not None
        self.jobs = jobs = JobQueue(
            records, self._BATCH_BYTES, clock, reads_files=reads_files, mark=device.mark
        )
        self._pace = StorePace(clock)
        jobs.hurry = self._pace.hurry
        self._steps = steps or EngineSteps()
        self._steps.listener = self._pace.step
        self._load_stages, self._store_stages = StagePool(), StagePool()
        self._staged = StagedPath(records, jobs, self._pace)
        self._has_buffers, self._has_memory = threading.Event(), threading.Event()
        """Set when the buffers are there, or will not be; and when an engine's start need not wait
        any longer for memory."""
        self.prepared = threading.Event()
        """Set when copies are as fast as they will get."""
        self._stopping = threading.Event()
        self._direct = DirectPath(device, jobs, open_direct) if open_direct else None
        loads = PagedPath(records, jobs, device.stream(urgent=True))
        stores = PagedPath(records, jobs, device.stream(urgent=False))
        load = partial(self._move, self._load_stages, self._staged.load, loads.load)
        store = partial(self._move, self._store_stages, self._staged.store, stores.store)
        serving = [partial(jobs.serve, jobs.load, load), partial(jobs.serve, jobs.store, store)]
        self._copying: list[threading.Thread] = []
        self._reading: list[threading.Thread] = []
        try:
            self._start(self._copying, [self._open, self._pin, *serving * self._THREADS])
            self._start(self._reading, [self._direct.run] if self._direct else [])
        except RuntimeError:  # the system gives no more threads
            self.close()
            raise

    def _start(self, started: list[threading.Thread], loops: Sequence[Callable[[], None]]) -> None:
        def run(loop: Callable[[], None]) -> None:
            with Attempt("a thread of the copier cannot use the device"):
                self._device.attach()  # what it cannot do fails job by job
            with Attempt("a thread of the copier has ended"):
                loop()

        for loop in loops:
            thread = threading.Thread(target=run, args=(loop,), name="kvtier-copy", daemon=True)
            thread.start()
            started.append(thread)

    def _open(self) -> None:
        """What takes long is done while the engine goes on, and its copies with it: they are slower
        until then. An engine that is about to serve waits for it (`make_ready`)."""
        layout, batch_bytes = self._records.layout, self._BATCH_BYTES
        try:
            for pool, urgent in ((self._load_stages, True), (self._store_stages, False)):
                stages = self._device.stages(layout, batch_bytes, urgent=urgent)
                for stage in stages:
                    self._staged.warm_up(stage)
                    self.jobs.fit(stage.rows)
                pool.use(stages)
        except ERRORS as error:
            what = "stores" if self._load_stages else "records"
            logger.warning("%s are copied page by page and verified by the host: %s", what, error)
        finally:
            self._has_buffers.set()

    def _pin(self) -> None:
        """Pinning memory, likewise."""
        try:
            if self._memory is not None:
                self._memory.pin_first(self._stopping)
                self._has_memory.set()
                self._memory.pin_rest(self._stopping)
        except ERRORS:
            logger.exception("the device's copies are slower than they could be")
        finally:
            self._has_memory.set()
            self._has_buffers.wait()
            self.prepared.set()

    def _move(
        self,
        stages: StagePool,
        staged: Callable[..., None],
        paged: Callable[[CopyBatch], None],
        batch: CopyBatch,
    ) -> None:
        """Move a batch from its beginning to its end."""
        if not stages.fits(batch):
            paged(batch)
            return
        with stages.stage(batch, self.jobs.clock) as stage:
            staged(batch, stage)

    # -- the engine's side -----------------------------------------------------------------

    def make_ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        there = (self._has_memory, self._has_buffers)
        return all(each.wait(max(0.0, end - time.monotonic())) for each in there)

    @property
    def staged(self) -> bool:
        """Whether batches go by way of buffers, in both directions."""
        return bool(self._load_stages and self._store_stages)

    @property
    def reads_files(self) -> bool:  # type: ignore[override]
        return self._direct is not None and self._direct.able

    @property
    def pinned(self) -> bool:  # type: ignore[override]
        return self.prepared.is_set()

    def close(self) -> None:
        self._stopping.set()
        self._steps.listener = None
        self.jobs.close()
        self._pace.stop()
        if self._direct is not None:
            self._direct.stop()
        reading = self._reading if self._direct and not self._direct.opening else []
        if not joined([*self._copying, *reading], CLOSE_S):
            # What the device copies stays pinned and mapped until the process ends.
            logger.error("a thread that copies has not ended within %g s", CLOSE_S)
        elif self._memory is not None:
            self._memory.close()
