"""The copier for KV tensors on a device with streams.

Where the device has buffers for it, batches go by way of them, and are proved there. Otherwise they
are copied page by page: threads prove what is to be loaded and queue copies, others wait for the
events, prove what was stored, and report. Nobody waits for the whole device, and no page costs
Python time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvtier.device.accelerator import ERRORS, Accelerator, Event, Lane, Stage
from kvtier.device.copier import (
    Copies,
    DeviceCopier,
    DeviceLayout,
    Host,
    Ints,
    Job,
    JobResult,
    Pieces,
    Prover,
    describe,
)
from kvtier.device.cuda.staged_copies import StagedPath
from kvtier.device.direct.loader import DirectLoader, DirectPath
from kvtier.device.queue import (
    CLOSE_S,
    Batch,
    JobQueue,
    Steps,
    StorePace,
    each_row,
    failed,
    head,
    unchanged,
)
from kvtier.system.calls import Attempt, joined
from kvtier.types import Outcome

logger = logging.getLogger(__name__)


class _Flight(NamedTuple):
    """A batch whose copies are queued on the device."""

    batch: Batch
    outcomes: list[Outcome]
    """So far: the rows that are OK are being copied."""
    stamps: dict[int, bytes]
    """Of a load's rows, from before they were proved."""
    event: Event | None
    held: object
    """What must live until the event."""


class _Pipe:
    """One direction: its stream, and the batches under way on it, in order."""

    _DEPTH = 16
    """Batches under way: enough to keep the link busy, few enough to bound what they hold."""

    def __init__(
        self,
        lane: Lane,
        copy: Callable[[Copies], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lane = lane
        self._clock = clock
        self.copy = copy
        self._room: Sequence[int] = ()
        self._stages: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.flights: queue.Queue[_Flight | None] = queue.Queue(self._DEPTH)

    @property
    def staged(self) -> bool:
        """Whether batches go by way of buffers."""
        return bool(self._room)

    def use(self, stages: Iterable[Stage]) -> None:
        """Let batches go by way of these from now on."""
        for stage in stages:
            self._stages.put(stage)
            self._room = stage.rows

    def by_stage(self, move: Callable[[Batch, Stage], None], batch: Batch) -> bool:
        """Move a batch in the next buffer that is free; False if there are none for it: it may have
        been cut before they were there."""
        if not self.staged or len(batch.rows) > self._room[batch.group]:
            return False
        with batch.busy.waiting(len(batch.rows), self._clock):
            stage = self._stages.get()
        try:
            move(batch, stage)
        finally:
            self._stages.put(stage)
        return True


class CudaCopier(DeviceCopier):
    """Moves records through a device's streams, both directions at once."""

    _BATCH_BYTES = 64 << 20

    def __init__(
        self,
        layout: DeviceLayout,
        device: Accelerator,
        host: Host,
        namespace: bytes,
        *,
        threads: int = 4,
        prepare: Callable[[threading.Event], object] = lambda stopping: None,
        follow: Callable[[threading.Event], object] = lambda stopping: None,
        on_close: Callable[[], None] = lambda: None,
        open_direct: Callable[[], DirectLoader | None] | None = None,
        steps: Steps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._device = device
        self._on_close = on_close
        self._prover = Prover(layout, host, namespace)
        self._job_queue = JobQueue(
            layout,
            self._prover,
            self._BATCH_BYTES,
            clock,
            reads_files=open_direct is not None,
        )
        self._pace = StorePace(clock)
        self._job_queue.hurry = self._pace.hurry
        self._steps = steps or Steps()
        self._steps.listener = self._pace.step
        first = host.record(0)
        self._slots_at = int(np.frombuffer(first, np.uint8).ctypes.data)
        self._slot_bytes = len(first)
        loads, stores = device.lane(urgent=True), device.lane(urgent=False)
        self._loads = _Pipe(loads, loads.to_device, clock)
        self._stores = _Pipe(stores, stores.to_host, clock)
        self._prepare, self._follow = prepare, follow
        self._has_buffers, self._has_memory = threading.Event(), threading.Event()
        """Set when the buffers are there, or will not be; and when an engine's start need not wait
        any longer for memory."""
        self.prepared = threading.Event()
        """Set when copies are as fast as they will get."""
        self._stopping = threading.Event()
        self._staged = StagedPath(
            layout, self._job_queue, self._prover, self._slots_at, self._slot_bytes, self._pace
        )
        self._direct = (
            DirectPath(layout, device, self._job_queue, open_direct) if open_direct else None
        )
        self._opening: list[threading.Thread] = []
        self._issuing: list[threading.Thread] = []
        self._reading: list[threading.Thread] = []
        self._landing: list[threading.Thread] = []
        try:
            self._start(self._opening, [self._open, self._pin])
            jobs = self._job_queue
            issue_loads = partial(jobs.serve, jobs.load, self._issue_load)
            issue_stores = partial(jobs.serve, jobs.store, self._issue_store)
            self._start(self._issuing, [issue_loads, issue_stores] * threads)
            self._start(self._reading, [self._direct.run] if self._direct else [])
            self._start(self._landing, [partial(self._land, self._loads, self._land_load)])
            land_stores = partial(self._land, self._stores, self._land_store)
            self._start(self._landing, [land_stores] * threads)
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
        try:
            for pipe, urgent in ((self._loads, True), (self._stores, False)):
                stages = self._device.stages(self._layout, self._BATCH_BYTES, urgent=urgent)
                for stage in stages:
                    self._staged.warm_up(stage)
                    self._job_queue.fit(stage.rows)
                pipe.use(stages)
        except ERRORS as error:
            what = "stores" if self._loads.staged else "records"
            logger.warning("%s are copied page by page and proved by the host: %s", what, error)
        finally:
            self._has_buffers.set()

    def _pin(self) -> None:
        """Pinning memory, likewise."""
        try:
            self._prepare(self._stopping)
            self._has_memory.set()
            self._follow(self._stopping)
        except ERRORS:
            logger.exception("the device's copies are slower than they could be")
        finally:
            self._has_memory.set()
            self._has_buffers.wait()
            self.prepared.set()

    # -- the engine's side -----------------------------------------------------------------

    def submit(self, job: Job, mark: object = None) -> None:
        self._job_queue.submit(job, self.mark() if mark is None else mark)

    def mark(self) -> Event:
        return self._device.mark()

    def make_ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        there = (self._has_memory, self._has_buffers)
        return all(each.wait(max(0.0, end - time.monotonic())) for each in there)

    def poll(self) -> list[JobResult]:
        return self._job_queue.poll()

    def give_up(self, id: int) -> None:
        self._job_queue.give_up(id)

    def wait(self, ids: Collection[int]) -> None:
        self._job_queue.wait(ids)

    @property
    def reads_files(self) -> bool:  # type: ignore[override]
        return self._direct is not None and self._direct.able

    @property
    def pinned(self) -> bool:  # type: ignore[override]
        return self.prepared.is_set()

    def close(self) -> None:
        self._stopping.set()
        self._steps.listener = None
        self._job_queue.close()
        self._pace.stop()
        if self._direct is not None:
            self._direct.stop()
        reading = self._reading if self._direct and not self._direct.opening else []
        ended = joined([*self._opening, *self._issuing, *reading], CLOSE_S)
        for pipe in (self._loads, self._stores) if ended else ():
            with contextlib.suppress(queue.Full):  # of what a device that hangs has not done
                pipe.flights.put(None, timeout=CLOSE_S)
        if ended and joined(self._landing, CLOSE_S):
            self._on_close()
        else:  # what the device copies stays pinned and mapped until the process ends
            logger.error("a thread that copies has not ended within %g s", CLOSE_S)

    # -- to the device ---------------------------------------------------------------------

    def _issue_load(self, batch: Batch) -> None:
        if self._loads.by_stage(self._staged.load, batch):
            return
        slots = batch.work.job.slots
        stamps = {row: self._prover.stamp(slots[row]) for row in batch.rows}
        outcomes = head(each_row(batch, self._prove), batch.work.failed)
        self._loads.flights.put(self._queue(self._loads, batch, outcomes, stamps))

    def _prove(self, batch: Batch, row: int) -> Outcome:
        key, slot, group = batch.work.record(row)
        outcome = self._prover.arrived(slot, key)
        return self._prover.verify(slot, key, group) if outcome.ok else outcome

    def _land_load(self, flight: _Flight) -> None:
        same = partial(unchanged, self._prover, flight.stamps)
        self._job_queue.finish(flight.batch, each_row(flight.batch, same, _landed(flight)))

    # -- from the device -------------------------------------------------------------------

    def _issue_store(self, batch: Batch) -> None:
        if self._stores.by_stage(self._staged.store, batch):
            return
        outcomes = each_row(batch, self._reserved)
        self._stores.flights.put(self._queue(self._stores, batch, outcomes, {}))

    def _reserved(self, batch: Batch, row: int) -> Outcome:
        key, slot, _ = batch.work.record(row)
        return self._prover.reserved(slot, key)

    def _land_store(self, flight: _Flight) -> None:
        batch, outcomes = flight.batch, _landed(flight)
        self._job_queue.released(batch)
        self._job_queue.finish(batch, each_row(batch, self._seal, outcomes))

    def _seal(self, batch: Batch, row: int) -> Outcome:
        key, slot, group = batch.work.record(row)
        return self._prover.complete(slot, key, group)

    # -- both ------------------------------------------------------------------------------

    def _queue(
        self, pipe: _Pipe, batch: Batch, outcomes: list[Outcome], stamps: dict[int, bytes]
    ) -> _Flight:
        """Queue the copies of the rows that are OK."""
        rows = np.array([row for row, each in zip(batch.rows, outcomes, strict=True) if each.ok])
        if not len(rows):
            return _Flight(batch, outcomes, stamps, None, None)
        job = batch.work.job
        slots: Ints = np.array([job.slots[row] for row in rows], np.int64)
        pieces = Pieces(*(column[rows] for column in batch.work.pieces))
        records = self._slots_at + slots * self._slot_bytes
        copies = describe(self._layout, job.blocks, pieces, records)
        held: object = None
        event: Event | None = None
        whole = False
        with pipe.lock:
            with Attempt(f"the device refused {batch.work.what}"):
                pipe.lane.after(batch.work.mark)
                held = pipe.copy(copies)
                whole = True
            with Attempt(f"the device failed {batch.work.what}"):
                event = pipe.lane.record()  # in any case: a part of the copies may be queued
        if not whole or event is None:
            outcomes = failed(outcomes)
        return _Flight(batch, outcomes, stamps, event, held)

    def _land(self, pipe: _Pipe, land: Callable[[_Flight], None]) -> None:
        while (flight := pipe.flights.get()) is not None:
            with self._job_queue.moving(flight.batch):
                land(flight)
        pipe.flights.put(None)  # for the next of these threads


def _landed(flight: _Flight) -> list[Outcome]:
    """Wait for a flight's copies; what became of its rows."""
    if flight.event is None:
        return flight.outcomes
    with Attempt(f"the device failed {flight.batch.work.what}"):
        flight.event.synchronize()
        return flight.outcomes
    return failed(flight.outcomes)
