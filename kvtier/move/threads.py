"""The mover on threads of this process: for the command line, for tests, and inside the mover's
process."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtier.interfaces.handler import Handler, HostHandler
from kvtier.interfaces.mover import Mover, MoverStats, Transfer, TransferKind, TransferResult
from kvtier.move.queues import (
    STAGING_BYTES,
    HandlerQueue,
    StagingPool,
    TransferBatch,
    TransferCounts,
    TransferJob,
)
from kvtier.record.record import Buffer, record_bytes, verify, verify_header
from kvtier.slab.layout import runs
from kvtier.system.calls import close_all
from kvtier.types import LoadStoreSpec, Namespace, Outcome

log = logging.getLogger(__name__)

_OF_SOURCES = (Outcome.GONE, Outcome.CORRUPT)
_OUTCOMES = frozenset(Outcome)


class BatchCarrier:
    """Moves batches with the stack's handlers and writes the outcome of every block.

    A batch goes straight into host memory, straight out of it, or through staging. Each byte is
    verified once on its way to whoever uses it (docs/how_it_works/proofs.md): here only if the
    transfer says that nobody else does it.
    """

    def __init__(self, handlers: Sequence[Handler], namespace: Namespace) -> None:
        self._handlers = handlers
        self._namespace = namespace
        self._digest = namespace.digest

    def carry(self, batch: TransferBatch) -> None:
        """Move a batch, or the half of a staged one that is due."""
        transfer = batch.job.transfer
        target = self._handlers[transfer.target]
        source = self._handlers[transfer.source]
        if transfer.kind is TransferKind.FIND:
            spec = transfer.source_spec
            batch.job.outcomes[:] = _checked(source.find(spec, transfer.keys), spec)
        elif isinstance(target, HostHandler):
            self._load(batch, source, target)
        elif isinstance(source, HostHandler):
            spec = transfer.source_spec.select(batch.start, batch.stop)
            self._store_from_host(batch, target, source.views(spec))
        elif not batch.arrived:
            self._fetch(batch, source)
        else:
            self._deliver(batch, target)

    def announce(self, batch: TransferBatch) -> None:
        """Tell a host target about blocks that will never land."""
        transfer = batch.job.transfer
        target = self._handlers[transfer.target]
        if not isinstance(target, HostHandler):
            return
        for index in range(batch.start, batch.stop):
            outcome = batch.job.outcomes[index]
            if not outcome.ok:
                target.landed(transfer.target_spec, index, outcome)

    def _load(self, batch: TransferBatch, source: Handler, target: HostHandler) -> None:
        spec = batch.job.transfer.target_spec
        records = target.views(spec.select(batch.start, batch.stop))
        for index, outcome in self._read(batch, source, records):
            batch.job.outcomes[index] = outcome
            target.landed(spec, index, outcome)

    def _fetch(self, batch: TransferBatch, source: Handler) -> None:
        for index, outcome in self._read(batch, source, batch.buffers):
            # Others would blame the target, which has not been asked yet.
            told = outcome.ok or outcome in _OF_SOURCES
            batch.job.outcomes[index] = outcome if told else Outcome.DROPPED

    def _deliver(self, batch: TransferBatch, target: Handler) -> None:
        if batch.job.transfer.deadline <= time.monotonic():
            batch.spoil(Outcome.TIMEOUT)
            return
        arrived = batch.moved()
        batch.spoil(Outcome.IO_ERROR)  # until the target says otherwise, should it raise
        for start, stop in arrived:
            self._store(batch, start, stop, target, batch.buffers[start:stop])

    def _read(
        self, batch: TransferBatch, source: Handler, into: Sequence[Buffer]
    ) -> Iterator[tuple[int, Outcome]]:
        """Read a batch's records; each is proved when it is asked for."""
        transfer, namespace = batch.job.transfer, self._namespace
        spec = transfer.source_spec.select(batch.start, batch.stop)
        keys = transfer.keys[batch.start : batch.stop]
        outcomes = _checked(source.load(spec, keys, into), spec)
        read = zip(outcomes, into, keys, strict=True)
        for index, (outcome, record, key) in enumerate(read, batch.start):
            if outcome.ok and transfer.prove:
                outcome = verify(record, key, self._digest)
            elif outcome.ok:
                size, parts = namespace.payload_of(key), namespace.parts
                outcome = verify_header(record, key, self._digest, size, parts)
            yield index, outcome

    def _store_from_host(
        self, batch: TransferBatch, target: Handler, records: Sequence[Buffer]
    ) -> None:
        """Write records of host memory, but none that has to be proved first, and is bad."""
        transfer, outcomes = batch.job.transfer, batch.job.outcomes
        good = list(range(len(records)))
        if transfer.prove:
            keys = transfer.keys[batch.start : batch.stop]
            for index, (record, key) in enumerate(zip(records, keys, strict=True)):
                if not (outcome := verify(record, key, self._digest)).ok:
                    outcomes[batch.start + index] = outcome
                    good.remove(index)
        for first, end in runs(good):
            start, stop = good[first], good[end - 1] + 1
            self._store(batch, start, stop, target, records[start:stop])

    def _store(
        self,
        batch: TransferBatch,
        start: int,
        stop: int,
        target: Handler,
        records: Sequence[Buffer],
    ) -> None:
        job = batch.job
        first, end = batch.start + start, batch.start + stop
        spec = job.transfer.target_spec.select(first, end)
        keys = job.transfer.keys[first:end]
        outcomes = _checked(target.store(spec, keys, records), spec)
        # GONE and CORRUPT are words about a source, for which it may have to answer: a target
        # that lost its slot has merely failed.
        job.outcomes[first:end] = [
            Outcome.IO_ERROR if outcome in _OF_SOURCES else outcome for outcome in outcomes
        ]


def _checked(outcomes: list[Outcome], spec: LoadStoreSpec) -> list[Outcome]:
    """What a handler has answered, which is somebody else's code, perhaps."""
    if len(outcomes) != len(spec):
        raise ValueError(f"a handler gave {len(outcomes)} outcomes for {len(spec)} blocks")
    for outcome in outcomes:
        if outcome not in _OUTCOMES:  # it would raise where the results are read
            raise ValueError(f"a handler said {outcome!r} of a block, which is no outcome")
    return outcomes


CLOSE_SECONDS = 10.0


class ThreadMover(Mover):
    """Carries transfers out on `concurrency` threads a handler, which bounds it by construction.

    One lock guards all queues. It is held for microseconds a batch, never while bytes move and
    never while a handler is called. Only a thread can end a call that hangs, and Python cannot end
    a thread: a transfer whose handler never returns has no result here (`ProcessMover` kills it).
    """

    def __init__(
        self,
        handlers: Sequence[Handler],
        namespace: Namespace,
        *,
        queue_blocks: Sequence[int] | None = None,
        staging_bytes: int = STAGING_BYTES,
        prefetch_share: float = 0.5,
    ) -> None:
        self._handlers = handlers
        self._namespace = namespace
        self._carrier = BatchCarrier(handlers, namespace)
        self._books = TransferCounts(
            [isinstance(each, HostHandler) for each in handlers], queue_blocks
        )
        self._record_bytes = record_bytes(namespace.payload_bytes)
        self._staging = StagingPool(self._record_bytes, staging_bytes)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._jobs: dict[int, TransferJob] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._sleepers: list[float] = []
        self._results: list[TransferResult] = []
        self._closed = False
        self._lanes = [
            HandlerQueue(
                self._lock, each.concurrency, each.batch_blocks, self._staging, prefetch_share
            )
            for each in handlers
        ]
        self._threads: list[threading.Thread] = []
        try:
            for tier, lane in enumerate(self._lanes):
                for index in range(lane.concurrency):
                    name = f"kvtier-move-{tier}-{index}"
                    thread = threading.Thread(
                        target=self._serve, args=(lane,), name=name, daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)
        except RuntimeError:  # the system gives no more threads
            self.close()
            raise

    def submit(self, transfer: Transfer) -> bool:
        now = time.monotonic()
        with self._lock:
            if self._closed:
                return False
            if transfer.id in self._jobs:
                raise ValueError(f"transfer {transfer.id} is in flight already")
            if not (lanes := self._books.admit(transfer)):
                return False
            batch_blocks = min(self._lanes[lane].batch_blocks for lane in lanes)
            job = TransferJob(transfer, lanes, batch_blocks, now)
            self._jobs[transfer.id] = job
            if job.ended:
                self._finish(job, now)
            else:
                self._remember_deadline(transfer)
                self._lanes[lanes[0]].add(job)
        return True

    def poll(self) -> list[TransferResult]:
        self._expire()
        with self._lock:
            results, self._results = self._results, []
        return results

    def wait(self, seconds: float) -> bool:
        with self._lock:
            if not self._results and (self._jobs or not self._closed):
                now = time.monotonic()
                until = min(now + seconds, self._next_deadline())
                self._sleepers.append(until)
                self._ended.wait(until - now)
                self._sleepers.remove(until)
            return bool(self._results) or self._next_deadline() <= time.monotonic()

    def cancel(self, ids: Sequence[int]) -> None:
        with self._lock:
            jobs = [self._jobs[each] for each in ids if each in self._jobs]
            batches = self._stop(jobs, Outcome.CANCELLED)
        self._end(batches)

    def hasten(self, ids: Sequence[int]) -> None:
        with self._lock:
            for job in [self._jobs[each] for each in ids if each in self._jobs]:
                if job.transfer.prefetch:
                    self._lanes[job.lanes[0]].hasten(job)
                    self._books.hasten(job.transfer)

    def stats(self) -> MoverStats:
        with self._lock:
            return self._books.stats()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            batches = self._stop(self._jobs.values(), Outcome.CANCELLED)
            batches += self._withdraw(float("inf"), Outcome.CANCELLED)
            for lane in self._lanes:
                lane.work.notify_all()
        self._end(batches)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            self._ended.notify_all()
        if any(thread.is_alive() for thread in self._threads):
            log.error("a handler does not return; its threads and files are left behind")
            return
        close_all(self._handlers)

    # ---- the life of a batch, on a lane's thread

    def _serve(self, lane: HandlerQueue) -> None:
        batch: TransferBatch | None = None
        while True:
            with self._lock:
                if batch is not None:
                    self._settle(batch)
                batch = self._take(lane)
            if batch is None:
                return
            self._run(batch)

    def _take(self, lane: HandlerQueue) -> TransferBatch | None:
        while not self._closed:
            batch = lane.take(time.monotonic())
            if batch is not None:
                return batch
            lane.sleep()
        return None

    def _run(self, batch: TransferBatch) -> None:
        if batch.verdict is not None or not self._guarded(self._carrier.carry, batch):
            self._guarded(self._carrier.announce, batch)

    def _guarded(self, action: Callable[[TransferBatch], None], batch: TransferBatch) -> bool:
        """Keep a handler's bug from ending the thread: its blocks fail, everything else goes on.
        Here, where no signal is heard, what is no Exception is a panic of Rust code."""
        try:
            action(batch)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() not in self._threads:
                raise
            transfer = batch.job.transfer
            log.exception(
                "a handler raised in transfer %d from tier %d to tier %d",
                transfer.id,
                transfer.source,
                transfer.target,
            )
            return False
        return True

    def _settle(self, batch: TransferBatch) -> None:
        """Under the lock: a batch has been run; pass it on, or end it and maybe its job."""
        job, now = batch.job, time.monotonic()
        if batch.prefetch:
            self._lanes[job.lanes[0]].prefetched()
        if batch.buffers:
            if not batch.arrived and batch.moved():
                batch.arrived = True
                if not self._closed and job.transfer.deadline > now:
                    self._lanes[job.lanes[1]].arrive(batch)
                    return
                batch.spoil(Outcome.CANCELLED if self._closed else Outcome.TIMEOUT)
            self._staging.give(batch.buffers)
            for lane in self._lanes:
                lane.staging_freed()
        job.settle(now)
        if job.ended:
            self._finish(job, now)

    def _finish(self, job: TransferJob, now: float) -> None:
        transfer = job.transfer
        del self._jobs[transfer.id]
        result = TransferResult(
            id=transfer.id,
            outcomes=job.outcomes,
            bytes_moved=self._bytes_moved(job),
            seconds=now - job.submitted,
            busy_seconds=job.busy_seconds,
        )
        self._books.release(transfer, job.outcomes)
        self._results.append(result)
        self._ended.notify_all()

    def _bytes_moved(self, job: TransferJob) -> int:
        namespace = self._namespace
        if job.transfer.kind is TransferKind.FIND:
            return 0
        if len(namespace.group_bytes) == 1:
            return job.outcomes.count(Outcome.OK) * self._record_bytes
        return sum(
            record_bytes(namespace.payload_of(key))
            for key, outcome in zip(job.transfer.keys, job.outcomes, strict=True)
            if outcome is Outcome.OK
        )

    # ---- ending what has not started

    def _stop(self, jobs: Iterable[TransferJob], verdict: Outcome) -> list[TransferBatch]:
        """Under the lock: take what has not started of these jobs out of the queues."""
        batches = []
        now = time.monotonic()
        for job in jobs:
            if job.next < job.size:
                self._lanes[job.lanes[0]].remove(job)
                batches.append(job.cut(job.size - job.next, now, verdict))
        return batches

    def _withdraw(self, due: float, verdict: Outcome) -> list[TransferBatch]:
        """Under the lock: take out of the queues what has come halfway and was to end by then.
        Loads go before it, so it might wait there for much longer."""
        batches = [batch for lane in self._lanes for batch in lane.withdraw(due)]
        for batch in batches:
            batch.spoil(verdict)
        return batches

    def _end(self, batches: Sequence[TransferBatch]) -> None:
        """Not under the lock, because targets are told: end batches that will not be moved."""
        for batch in batches:
            self._guarded(self._carrier.announce, batch)
        with self._lock:
            for batch in batches:
                self._settle(batch)

    def _expire(self) -> None:
        """End what is late and in a queue, even when every thread of its lane hangs."""
        late = []
        with self._lock:
            now = time.monotonic()
            while self._next_deadline() <= now:
                job = self._jobs.get(heapq.heappop(self._deadlines)[1])
                if job is not None and job.transfer.deadline <= now:
                    late.append(job)
            batches = self._stop(late, Outcome.TIMEOUT)
            if late:
                batches += self._withdraw(now, Outcome.TIMEOUT)
        self._end(batches)

    def _remember_deadline(self, transfer: Transfer) -> None:
        heapq.heappush(self._deadlines, (transfer.deadline, transfer.id))
        if transfer.deadline < max(self._sleepers, default=0.0):
            self._ended.notify_all()
        if len(self._deadlines) > 2 * len(self._jobs) + 64:  # mostly of transfers that ended
            jobs = self._jobs.values()
            self._deadlines = [(job.transfer.deadline, job.transfer.id) for job in jobs]
            heapq.heapify(self._deadlines)

    def _next_deadline(self) -> float:
        """Under the lock: when the next transfer may be late; infinity when there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._jobs:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")
