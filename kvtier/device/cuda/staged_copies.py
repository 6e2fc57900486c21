"""Batches by way of a buffer on the device: a thread takes each from its beginning to its end.

Meanwhile the link carries those of other threads, which have buffers of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from kvtier.device.accelerator import Event, Stage
from kvtier.device.copier import DeviceLayout, Ints, Prover
from kvtier.device.queue import Batch, JobQueue, StorePace, each_row, failed, head, unchanged
from kvtier.record.record import HEADER_BYTES
from kvtier.system.calls import Attempt
from kvtier.types import Outcome


class _Queued(NamedTuple):
    """Something that was given to the device."""

    whole: bool
    """Else a part of it was refused."""
    event: Event | None
    held: object
    """What must live until the event."""


STORES_SHARE = 0.4
"""The part of the time for which stores may be on the link while loads are on it. Loads lose up to
a fifth while something crosses it the other way, and are to lose less than 10 %."""
STORES_AT_ONCE = 2
"""Stores that may be on the link together. What the engine itself copies to the host, like the
tokens of each step, may have to wait for all of them; one alone would leave the link idle for as
long as its thread is late."""


class Turns:
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


class StagedPath:
    """Moves batches between slots and pages."""

    def __init__(
        self,
        layout: DeviceLayout,
        job_queue: JobQueue,
        prover: Prover,
        slots_at: int,
        slot_bytes: int,
        pace: StorePace,
    ) -> None:
        self._layout = layout
        self._pace = pace
        self._job_queue = job_queue
        self._prover = prover
        self._slots_at = slots_at
        self._slot_bytes = slot_bytes
        self._turns = Turns()

    def warm_up(self, stage: Stage) -> None:
        """Do what a load and a store do, of one record, without a page and to no slot: what is done
        for the first time takes many times as long. Raises what the device does."""
        none = np.full((1, self._layout.blocks_per_chunk), -1)
        for group, size in enumerate(self._layout.part_bytes):
            scratch = np.zeros(size, np.uint8)
            part = self._slots_at + HEADER_BYTES + self._layout.part * size
            held = [stage.fetch(group, np.array([part]))]
            stage.digest(group, 1)
            stage.scatter(group, none)
            stage.gather(group, none)
            held.append(stage.send(group, np.array([int(scratch.ctypes.data)])))
            stage.record().synchronize()
            stage.sums(group, 1)

    # -- to the device ---------------------------------------------------------------------

    def load(self, batch: Batch, stage: Stage) -> None:
        """Slots to the buffer; what is proved there goes on to its pages."""
        slots = batch.work.job.slots
        stamps = {row: self._prover.stamp(slots[row]) for row in batch.rows}
        arrived = each_row(batch, self._arrived)
        proved = head(self._prove(batch, stage, arrived), batch.work.failed)
        placed = self._place(batch, stage, arrived, proved)
        same = partial(unchanged, self._prover, stamps)
        self._job_queue.finish(batch, each_row(batch, same, placed))

    def _arrived(self, batch: Batch, row: int) -> Outcome:
        key, slot, group = batch.work.record(row)
        outcome = self._prover.arrived(slot, key)
        return self._prover.header(slot, key, group) if outcome.ok else outcome

    def _prove(self, batch: Batch, stage: Stage, arrived: list[Outcome]) -> list[Outcome]:
        """Fetch what has arrived; what the checksums of its bytes, there, make of it."""
        rows = _good(batch, arrived)
        if not rows:
            return arrived
        group = batch.group
        fetch = partial(stage.fetch, group, self._parts(batch, rows))
        # The kernels wait on the device until the bytes are there: one time less that this thread
        # has to wake up. What they could hold up (`_reach`) are other loads alone: these streams
        # are of another urgency than the engine's.
        with self._turns.load():
            fine = _done(batch, stage, fetch, partial(stage.digest, group, len(rows)))
        if not fine:
            return failed(arrived)
        sums = dict(zip(rows, stage.sums(group, len(rows)), strict=True))

        def proved(batch: Batch, row: int) -> Outcome:
            right = sums[row] == self._prover.stated(batch.work.job.slots[row])
            return Outcome.OK if right else Outcome.CORRUPT

        return each_row(batch, proved, arrived)

    def _place(
        self, batch: Batch, stage: Stage, arrived: list[Outcome], proved: list[Outcome]
    ) -> list[Outcome]:
        """Copy what is proved from the buffer, where all that has arrived lies, to its pages."""
        fetched, good = _good(batch, arrived), _good(batch, proved)
        if not good:
            return proved
        ids = self._ids(batch, fetched)
        if good != fetched:
            ids[~np.isin(fetched, good)] = -1

        def place() -> None:
            _reach(batch, self._job_queue.clock)
            stage.scatter(batch.group, ids)

        return proved if _done(batch, stage, place) else failed(proved)

    # -- from the device -------------------------------------------------------------------

    def store(self, batch: Batch, stage: Stage) -> None:
        """Pages to the buffer, which is all that the engine waits for, and on to the slots."""
        outcomes = each_row(batch, self._reserved)
        rows = _good(batch, outcomes)
        if rows:
            with self._pace.turn():
                outcomes = self._leave(batch, stage, rows, outcomes)
        self._job_queue.finish(batch, outcomes)

    def _leave(
        self, batch: Batch, stage: Stage, rows: list[int], outcomes: list[Outcome]
    ) -> list[Outcome]:
        group = batch.group

        def leave() -> None:
            _reach(batch, self._job_queue.clock)
            stage.gather(group, self._ids(batch, rows))

        left = _queue(batch, stage, leave)
        summed = left
        if left.whole:
            summed = _queue(batch, stage, lambda: stage.digest(group, len(rows)))
        fine = _ended(batch, left)
        self._job_queue.released(batch)
        fine = _ended(batch, summed) and fine
        if fine:
            with self._turns.store():
                fine = _done(batch, stage, lambda: stage.send(group, self._parts(batch, rows)))
        if not fine:
            return failed(outcomes)
        return self._seal(batch, stage, rows, outcomes)

    def _reserved(self, batch: Batch, row: int) -> Outcome:
        key, slot, _ = batch.work.record(row)
        return self._prover.reserved(slot, key)

    def _seal(
        self, batch: Batch, stage: Stage, rows: list[int], outcomes: list[Outcome]
    ) -> list[Outcome]:
        sums = dict(zip(rows, stage.sums(batch.group, len(rows)), strict=True))

        def seal(batch: Batch, row: int) -> Outcome:
            key, slot, group = batch.work.record(row)
            return self._prover.complete(slot, key, group, sums[row])

        return each_row(batch, seal, outcomes)

    # -- both ------------------------------------------------------------------------------

    def _parts(self, batch: Batch, rows: list[int]) -> Ints:
        """Where this rank's parts of these rows lie in host memory."""
        slots = np.array([batch.work.job.slots[row] for row in rows], np.int64)
        part = HEADER_BYTES + self._layout.part * self._layout.part_bytes[batch.group]
        return self._slots_at + slots * self._slot_bytes + part

    def _ids(self, batch: Batch, rows: list[int]) -> Ints:
        """The block at each place of these rows; -1 where a partial chunk has none."""
        return batch.work.places(rows, self._layout.blocks_per_chunk)


def _reach(batch: Batch, clock: Callable[[], float]) -> None:
    """Wait until the engine has done what it had queued when the job was given.

    By this thread, not by the stream: streams share a few queues of the device, where what waits
    holds up what comes behind it, other batches as well as the engine's own work. Once for each
    job, because asking gives the GIL away.
    """
    if not batch.work.reached:
        with batch.busy.waiting(len(batch.rows), clock):
            batch.work.mark.synchronize()
        batch.work.reached = True


def _good(batch: Batch, outcomes: list[Outcome]) -> list[int]:
    return [row for row, outcome in zip(batch.rows, outcomes, strict=True) if outcome.ok]


def _done(batch: Batch, stage: Stage, *steps: Callable[[], object]) -> bool:
    """Give something to the device, and wait; whether all of it was done."""
    return _ended(batch, _queue(batch, stage, *steps))


def _queue(batch: Batch, stage: Stage, *steps: Callable[[], object]) -> _Queued:
    held, whole = [], False
    with Attempt(f"the device refused {batch.work.what}"):
        for step in steps:
            held.append(step())
        whole = True
    with Attempt(f"the device failed {batch.work.what}"):
        return _Queued(whole, stage.record(), held)  # in any case: a part of it may be queued
    return _Queued(False, None, held)


def _ended(batch: Batch, queued: _Queued) -> bool:
    """Wait; whether all of it was done."""
    with Attempt(f"the device failed {batch.work.what}"):
        if queued.event is not None:
            queued.event.synchronize()
        return queued.whole
    return False
