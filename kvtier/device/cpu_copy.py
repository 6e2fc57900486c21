"""The copier for KV tensors that lie in host memory: an engine on its CPU platform.

One strided copy moves the pages of all layers of neighbouring blocks at once, at the speed of a
plain memmove and without Python's lock. A record's copy, its checksum and the check that nobody
replaced it meanwhile follow each other while it is in the processor's cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.record import Buffer
from kvtier.core.transfer import TransferKind
from kvtier.device.jobs import DeviceCopier, Host, Job, JobResult, Prover
from kvtier.device.layout import DeviceLayout
from kvtier.device.plan import Pieces, cut, whole
from kvtier.types import Outcome

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


def host_arrays(caches: Any) -> list[Bytes]:
    """The KV tensors of canonical caches in host memory as arrays of pages, without copying."""
    return [entry.tensor.numpy().view(np.uint8) for entry in caches.tensors]


class _Stack(NamedTuple):
    """References whose pages are equally large and equally far apart: one strided array."""

    pages: Bytes
    """Block, reference, byte."""
    at: int
    """Where their pages begin in the part."""


class PageCopier:
    """Copies pages between KV tensors and a rank's part of a record."""

    def __init__(self, layout: DeviceLayout, arrays: Sequence[Bytes]) -> None:
        self._per_chunk = layout.blocks_per_chunk
        self._keep = arrays
        self._stacks = [self._stack(layout, group, arrays) for group in range(len(layout.groups))]

    def _stack(self, layout: DeviceLayout, group: int, arrays: Sequence[Bytes]) -> list[_Stack]:
        refs = layout.groups[group]
        stacks = []
        first = 0
        while first < len(refs):
            stop, step = _alike(layout, group, arrays, first)
            base = arrays[refs[first].tensor]
            pages = np.lib.stride_tricks.as_strided(
                base,
                (layout.blocks, stop - first, refs[first].page_bytes),
                (base.strides[0], step, 1),
            )
            stacks.append(_Stack(pages, layout.ref_at[group][first]))
            first = stop
        return stacks

    def gather(self, group: int, ids: Sequence[int], skip: int, part: Buffer) -> None:
        """Copy blocks to their places in a part, from block `skip` of the chunk on."""
        for stack in self._stacks[group]:
            host = self._host(stack, part)
            for start, stop in _runs(ids):
                block = ids[start]
                pages = stack.pages[block : block + stop - start]
                host[:, skip + start : skip + stop] = pages.swapaxes(0, 1)

    def scatter(self, group: int, ids: Sequence[int], skip: int, part: Buffer) -> None:
        """Copy a part's blocks from `skip` on to these blocks of the device."""
        for stack in self._stacks[group]:
            host = self._host(stack, part)
            for start, stop in _runs(ids):
                block = ids[start]
                pages = stack.pages[block : block + stop - start]
                pages.swapaxes(0, 1)[:] = host[:, skip + start : skip + stop]

    def _host(self, stack: _Stack, part: Buffer) -> Bytes:
        _, refs, size = stack.pages.shape
        array = np.frombuffer(part, np.uint8, refs * self._per_chunk * size, stack.at)
        return array.reshape(refs, self._per_chunk, size)


def _alike(
    layout: DeviceLayout, group: int, arrays: Sequence[Bytes], first: int
) -> tuple[int, int]:
    """Where the references end that form one strided array with the first, and its step."""
    refs = layout.groups[group]

    def address(index: int) -> int:
        return int(arrays[refs[index].tensor].__array_interface__["data"][0])

    def shape(index: int) -> tuple[int, int]:
        return refs[index].page_bytes, arrays[refs[index].tensor].strides[0]

    stop = first + 1
    if stop == len(refs) or shape(stop) != shape(first):
        return stop, 0
    step = address(stop) - address(first)
    while (
        stop < len(refs)
        and shape(stop) == shape(first)
        and address(stop) - address(stop - 1) == step
    ):
        stop += 1
    return stop, step


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of neighbouring block numbers, as (start, stop)."""
    cuts = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(ids)], strict=True))


class _Work:
    """A job under way: what waits, what runs, and what became of the rest."""

    def __init__(self, job: Job, pieces: Pieces, now: float) -> None:
        self.job = job
        self.groups: list[int] = pieces.group.tolist()
        self.skips: list[int] = pieces.skip.tolist()
        ids: list[int] = job.blocks.ids.tolist()
        spans = zip(pieces.at.tolist(), pieces.length.tolist(), strict=True)
        self.ids = [ids[at : at + length] for at, length in spans]
        self.waiting = deque(range(len(pieces)))
        self.outcomes: list[Outcome | None] = [None] * len(pieces)
        self.running = 0
        self.moved = 0
        self.started = now
        self.busy_since = now
        self.busy = 0.0

    def give_up(self, outcome: Outcome) -> None:
        """Everything that has not begun ends with this outcome."""
        for index in self.waiting:
            self.outcomes[index] = outcome
        self.waiting.clear()

    @property
    def ended(self) -> bool:
        return not self.waiting and not self.running


class _Batch(NamedTuple):
    """Records of a job that one thread moves."""

    work: _Work
    rows: list[int]


class CpuCopier(DeviceCopier):
    """Moves records with a few threads; one for stores, so that loads find room.

    A store waits between records while a load has one that it could copy.
    """

    _POLL_S = 0.001
    """How often records that are still arriving are looked at: they come from another process."""
    _AHEAD = 16
    """How many of a job's waiting records are looked at: they arrive nearly in order."""
    _BATCH_BYTES = 1 << 20
    """Records are moved in batches: meeting at a lock costs as much as copying a small one."""

    def __init__(
        self,
        layout: DeviceLayout,
        arrays: Sequence[Bytes],
        host: Host,
        namespace: bytes,
        *,
        load_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._pages = PageCopier(layout, arrays)
        self._prover = Prover(layout, host, namespace)
        self._clock = clock
        self._block_bytes = [size // layout.blocks_per_chunk for size in layout.part_bytes]
        self._at_once = max(1, self._BATCH_BYTES // max(layout.part_bytes))
        self._lock = threading.Lock()
        self._woken = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._loads: list[_Work] = []
        self._stores: list[_Work] = []
        self._results: list[JobResult] = []
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(take,), name=f"kvtier-{name}", daemon=True)
            for name, take in [
                *(("load", self._next_load),) * load_threads,
                ("store", self._next_store),
            ]
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's side -----------------------------------------------------------------

    def submit(self, job: Job) -> None:
        pieces = cut(self._layout, job.blocks)
        if not len(pieces) == len(job.keys) == len(job.slots):
            raise ValueError(f"{len(job.keys)} keys and {len(job.slots)} slots for {len(pieces)}")
        work = _Work(job, pieces, self._clock())
        if job.kind is TransferKind.STORE:
            for index in np.flatnonzero(~whole(self._layout, pieces)).tolist():
                work.waiting.remove(index)
                work.outcomes[index] = Outcome.DROPPED  # a record is a whole chunk or nothing
        with self._lock:
            if self._closing:
                work.give_up(Outcome.CANCELLED)
            (self._loads if job.kind is TransferKind.LOAD else self._stores).append(work)
            self._settle(work)
            self._woken.notify_all()

    def poll(self) -> list[JobResult]:
        with self._lock:
            results, self._results = self._results, []
        return results

    def wait(self, ids: Collection[int]) -> None:
        with self._lock:
            while any(work.job.id in ids for work in [*self._loads, *self._stores]):
                self._done.wait()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            for work in [*self._loads, *self._stores]:
                work.give_up(Outcome.CANCELLED)
                self._settle(work)
            self._woken.notify_all()
        for thread in self._threads:
            thread.join()

    # -- threads ---------------------------------------------------------------------------

    def _run(self, take: Callable[[], _Batch | None]) -> None:
        while True:
            with self._lock:
                while (batch := take()) is None:
                    if self._closing:
                        return
                    self._woken.wait(self._POLL_S if self._loads else None)
                work = batch.work
                if not work.running:
                    work.busy_since = self._clock()
                work.running += len(batch.rows)
            outcomes = self._move_all(batch)
            with self._lock:
                self._finish(batch, outcomes)

    def _next_load(self) -> _Batch | None:
        """Records that have arrived, of the oldest load that has some."""
        for work in list(self._loads):
            rows = self._arrived(work)
            if rows:
                for row in rows:
                    work.waiting.remove(row)
                return _Batch(work, rows)
            if work.waiting and self._clock() >= work.job.deadline:
                work.give_up(Outcome.TIMEOUT)
                self._settle(work)
        return None

    def _next_store(self) -> _Batch | None:
        if any(self._arrived(work) for work in self._loads):
            return None
        for work in self._stores:
            if work.waiting:
                count = min(self._at_once, len(work.waiting))
                return _Batch(work, [work.waiting.popleft() for _ in range(count)])
        return None

    def _arrived(self, work: _Work) -> list[int]:
        """The first waiting records that are no longer on their way."""
        slots, pending = work.job.slots, self._prover.pending
        rows = islice(work.waiting, max(self._AHEAD, self._at_once))
        return list(islice((row for row in rows if not pending(slots[row])), self._at_once))

    def _move_all(self, batch: _Batch) -> list[Outcome]:
        """Move the batch's records; a load ends with the first that fails."""
        outcomes = []
        for row in batch.rows:
            try:
                outcome = self._move(batch.work, row)
            except (ValueError, IndexError, TypeError):  # a slot or region that is not there
                logger.exception("a %s of the engine failed", batch.work.job.kind.value)
                outcome = Outcome.IO_ERROR
            outcomes.append(outcome)
            if not outcome.ok and batch.work.job.kind is TransferKind.LOAD:
                break
        rest = len(batch.rows) - len(outcomes)
        return outcomes + [Outcome.CANCELLED] * rest

    def _move(self, work: _Work, index: int) -> Outcome:
        key, slot, group = work.job.keys[index], work.job.slots[index], work.groups[index]
        ids, skip, part = work.ids[index], work.skips[index], self._prover.part(slot, group)
        if work.job.kind is TransferKind.STORE:
            if not self._prover.reserved(slot, key):
                return Outcome.GONE
            self._pages.gather(group, ids, skip, part)
            self._prover.seal(slot, key, group)
            return Outcome.OK if self._prover.reserved(slot, key) else Outcome.GONE
        stamp = self._prover.stamp(slot)
        outcome = self._prover.arrived(slot, key)
        if not outcome.ok:
            return outcome
        outcome = self._prover.verify(slot, key, group)
        if outcome.ok:
            self._pages.scatter(group, ids, skip, part)
        return outcome if self._prover.unchanged(slot, stamp) else Outcome.GONE

    def _finish(self, batch: _Batch, outcomes: list[Outcome]) -> None:
        work = batch.work
        work.running -= len(batch.rows)
        if not work.running:
            work.busy += self._clock() - work.busy_since
        for row, outcome in zip(batch.rows, outcomes, strict=True):
            work.outcomes[row] = outcome
            if outcome.ok:
                work.moved += self._block_bytes[work.groups[row]] * len(work.ids[row])
            elif work.job.kind is TransferKind.LOAD:
                work.give_up(Outcome.CANCELLED)  # the engine recomputes the whole request
        self._settle(work)

    def _settle(self, work: _Work) -> None:
        """Turn a job that has ended into its result."""
        if not work.ended:
            return
        lane = self._loads if work.job.kind is TransferKind.LOAD else self._stores
        lane.remove(work)
        self._results.append(
            JobResult(
                id=work.job.id,
                kind=work.job.kind,
                outcomes=[outcome or Outcome.CANCELLED for outcome in work.outcomes],
                bytes_moved=work.moved,
                seconds=self._clock() - work.started,
                busy_seconds=work.busy,
            )
        )
        self._done.notify_all()
