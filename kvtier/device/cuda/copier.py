"""The copier for KV tensors on a device with streams.

Where the device has buffers for it, batches go by way of them, and are verified there. Otherwise
they go page by page. Nobody waits for the whole device, and no page costs Python time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from kvtier.device.accelerator import ERRORS, Accelerator, StreamEvent
from kvtier.device.copier import CopyJob, CopyResult, DeviceCopier
from kvtier.device.cuda.paths import PagedPath, StagedPath, StagePool
from kvtier.device.direct.loader import DirectLoader, DirectPath
from kvtier.device.pacing import EngineSteps, StorePace
from kvtier.device.queue import CLOSE_S, CopyBatch, JobQueue
from kvtier.device.records import RankRecords
from kvtier.system.calls import Attempt, joined

logger = logging.getLogger(__name__)


class HostMemory(Protocol):
    """Host memory that a device reaches faster once it is pinned: a `PinnedMemory`."""

    def pin_first(self, stopping: threading.Event) -> None:
        """Pin what an engine's start waits for."""

    def pin_rest(self, stopping: threading.Event) -> object:
        """Pin the rest beside it."""

    def close(self) -> None:
        """Unpin it; nothing may be copying any more."""


class CudaCopier(DeviceCopier):
    """Moves records through a device's streams, both directions at once."""

    _BATCH_BYTES = 64 << 20

    def __init__(
        self,
        records: RankRecords,
        device: Accelerator,
        *,
        threads: int = 4,
        memory: HostMemory | None = None,
        open_direct: Callable[[], DirectLoader | None] | None = None,
        steps: EngineSteps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._device = device
        self._memory = memory
        reads_files = open_direct is not None
        self._job_queue = jobs = JobQueue(
            records, self._BATCH_BYTES, clock, reads_files=reads_files
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
            self._start(self._copying, [self._open, self._pin, *serving * threads])
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
                    self._job_queue.fit(stage.rows)
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
        with stages.stage(batch, self._job_queue.clock) as stage:
            staged(batch, stage)

    # -- the engine's side -----------------------------------------------------------------

    def submit(self, job: CopyJob, mark: object = None) -> None:
        self._job_queue.submit(job, self.mark() if mark is None else mark)

    def mark(self) -> StreamEvent:
        return self._device.mark()

    def make_ready(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        there = (self._has_memory, self._has_buffers)
        return all(each.wait(max(0.0, end - time.monotonic())) for each in there)

    def poll(self) -> list[CopyResult]:
        return self._job_queue.poll()

    def give_up(self, id: int) -> None:
        self._job_queue.give_up(id)

    def wait(self, ids: Collection[int]) -> None:
        self._job_queue.wait(ids)

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
        self._job_queue.close()
        self._pace.stop()
        if self._direct is not None:
            self._direct.stop()
        reading = self._reading if self._direct and not self._direct.opening else []
        if not joined([*self._copying, *reading], CLOSE_S):
            # What the device copies stays pinned and mapped until the process ends.
            logger.error("a thread that copies has not ended within %g s", CLOSE_S)
        elif self._memory is not None:
            self._memory.close()
