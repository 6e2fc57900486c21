"""Jobs in, batches out, results back, between the engine and the copier's threads."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import msgspec
import numpy as np

from kvtier.device.copier import Busy, DeviceLayout, Ints, Job, JobResult, Pieces, Prover, cut
from kvtier.interfaces.mover import TransferKind
from kvtier.system.calls import Attempt
from kvtier.types import BlockKey, Outcome, group_of

logger = logging.getLogger(__name__)

CLOSE_S = 20.0
"""The engine's thread waits no longer for a copier's threads to end."""
LOCK_KEPT_S = 2e-4
"""For so long the engine's thread keeps the GIL while one of a copier's waits for it. These
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


# A job under way, and the batches of rows that are cut from it.


class Work:
    """A job under way: what waits, what runs, and what became of the rest; rows are its records."""

    def __init__(self, job: Job, pieces: Pieces, mark: Any, now: float) -> None:
        self.job = job
        self.what = f"a {job.kind.value}"
        self.pieces = pieces
        self.mark = mark
        """How far the engine's own work had come when the job was given, as the copier says it."""
        self.reached = False  # that far, as a thread has seen
        self._places: Ints | None = None
        self.groups: list[int] = pieces.group.tolist()
        self.waiting = deque(row for row in range(len(pieces)) if row not in job.files)
        """Rows with a slot that have not begun; those without are `unread`."""
        self.unread = deque(sorted(job.files))
        self.outcomes = [Outcome.CANCELLED] * len(pieces)
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

    def record(self, row: int) -> tuple[BlockKey, int, int]:
        """A row's key, slot and group."""
        return self.job.keys[row], self.job.slots[row], self.groups[row]

    def places(self, rows: Sequence[int], per_chunk: int) -> Ints:
        """The block at each place of these rows' chunks; -1 where a partial one has none."""
        if self._places is None:  # by whichever thread is first: once for all batches
            pieces, ids = self.pieces, self.job.blocks.ids
            place = np.arange(per_chunk) - pieces.skip[:, None]
            inside = (place >= 0) & (place < pieces.length[:, None])
            at = np.where(inside, pieces.at[:, None] + place, 0)
            self._places = np.where(inside, ids[at], -1)
        return self._places[rows]

    @property
    def loading(self) -> bool:
        """Whether it brings bytes to the device."""
        return self.job.kind is TransferKind.LOAD

    @property
    def ended(self) -> bool:
        """Whether every row has an outcome."""
        return not (self.waiting or self.unread or self.copying.running or self.reading.running)

    def give_up(self, outcome: Outcome) -> None:
        """Everything that has not begun ends with this outcome."""
        for rows in (self.waiting, self.unread):
            for row in rows:
                self.outcomes[row] = outcome
            rows.clear()


class Batch(msgspec.Struct, eq=False):
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
        return self.work.groups[self.rows[0]]

    @property
    def failure(self) -> str:
        """What the log says if a step of it raises."""
        return f"{self.work.what} of the engine failed"

    @property
    def busy(self) -> Busy:
        """The clock that runs meanwhile."""
        return self.work.reading if self.from_files else self.work.copying


def each_row(
    batch: Batch, step: Callable[[Batch, int], Outcome], so_far: Sequence[Outcome] = ()
) -> list[Outcome]:
    """One step for every row, in order; for none that is not good any more, if it is said how the
    rows have fared so far."""
    outcomes, failure = [], batch.failure
    for row, outcome in zip(batch.rows, so_far or [Outcome.OK] * len(batch.rows), strict=True):
        if outcome.ok:
            outcome = Outcome.IO_ERROR
            with Attempt(failure):
                outcome = step(batch, row)
        outcomes.append(outcome)
    return outcomes


def unchanged(prover: Prover, stamps: Mapping[int, bytes], batch: Batch, row: int) -> Outcome:
    """OK if a row's slot still holds the record that it held when these stamps were taken."""
    same = prover.unchanged(batch.work.job.slots[row], stamps[row])
    return Outcome.OK if same else Outcome.GONE


def head(outcomes: list[Outcome], failed: bool) -> list[Outcome]:
    """Cancel rows that are good so far, but come after one that is not: of a load that has failed
    no more is copied."""
    kept = []
    for outcome in outcomes:
        kept.append(Outcome.CANCELLED if failed and outcome.ok else outcome)
        failed = failed or not outcome.ok
    return kept


def failed(outcomes: list[Outcome]) -> list[Outcome]:
    """What becomes of a batch that the device has not moved."""
    return [Outcome.IO_ERROR if outcome.ok else outcome for outcome in outcomes]


# When an engine is at rest, as far as one of its workers is told.

_REST_S = 0.05
"""Between two steps of a busy engine there is less."""
_WEIGHT = 0.2


class Steps:
    """Begin and end in the worker's own thread; others ask. No lock, because each of these is one
    number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._ended = 0.0
        self._running = False
        self.any = False
        """Whether there has been one at all."""
        self.seconds = 0.0
        """From the beginning of one to that of the next, while they follow each other."""
        self.listener: Callable[[int, float], None] | None = None
        """Told of each step that another has followed: how many requests it only decoded, 0 if it
        did anything else, and its seconds."""
        self._decoding = 0

    def begin_anew(self) -> None:
        """Those so far were an engine's trials, before it serves."""
        self.any = self._running = False
        self.seconds = 0.0

    def began(self, decoding: int = 0) -> None:
        """The engine goes to work: it decodes so many requests and does nothing else, or 0."""
        now = self._clock()
        if self.any and now - self._ended < _REST_S:
            taken = now - self._began
            self.seconds += _WEIGHT * (taken - self.seconds) if self.seconds else taken
            if self.listener is not None:
                self.listener(self._decoding, taken)
        self._decoding = decoding
        self._began, self._running, self.any = now, True, True

    def ended(self) -> None:
        """It has what it wanted, or it has only begun to wait for it."""
        self._ended, self._running = self._clock(), False

    @property
    def resting(self) -> bool:
        """Whether no step has come for a while."""
        return not self.any or (not self._running and self._clock() - self._ended >= _REST_S)


SHARE = 0.02
"""So much of a step may be lost to what goes on beside it."""
_REST_SLICE_S = 0.002
"""A step that begins while the engine rests may come in the middle of a slice."""
_PATIENCE_S = 60.0
"""An engine that never rests would keep slow copies for ever. After so long a slice may take more
of one step than `SHARE`, but not of all steps together."""


class Gaps:
    """Where there is room for slices of work that hold up a step: while the engine rests, or so
    short that no step is noticeably longer for it."""

    def __init__(self, steps: Steps, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._last = self._fitted = clock()
        self._pause = 0.0

    def room(self, least: float) -> float:
        """How many seconds a slice may take now, of which none takes less than so many; 0 if it has
        to wait."""
        now, room = self._clock(), SHARE * self._steps.seconds
        if self._steps.resting:
            self._fitted = now
            return max(_REST_SLICE_S, least)
        if now - self._last < self._pause:
            return 0.0
        if least <= room:
            self._fitted = now
            return room
        return least if now - self._fitted >= _PATIENCE_S else 0.0

    def took(self, seconds: float) -> None:
        """What a slice has taken."""
        self._last, self._pause = self._clock(), seconds / SHARE


# How much of the time stores get, so that they do not hold up an engine that only decodes.
#
# Steps in which each request gets one token are alike: their times with a store beside them and
# without one are compared while the engine serves. What stores cost a prompt is not measured,
# because no two steps with prompts are alike. So nothing slows stores while the engine computes
# prompts.

LOST_MAX, LOST_LITTLE = 0.01, 0.005
"""Above the first, stores get less of the time. Below the second they get more."""
_SHARE_MIN = 1 / 64
_WINDOW = 16
"""Steps of each kind that are compared."""
_FRESH_S = 10.0
"""Steps become longer as their requests do. So older ones count no more."""
_DECODING_S = 1.0
"""If no step has only decoded for so long, the pace is full."""


class StorePace:
    """One engine's. The engine's own thread tells of its steps, a copier's threads of their stores.

    The engine's thread takes no lock in a step. Only it writes what is compared; a copier's threads
    read single numbers of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._active = 0
        self._touched = False
        """Whether a store ran beside the current step."""
        self._next = 0.0
        """When the next store may begin, if stores do not have all of the time."""
        self._held_until = 0.0
        self._hurried = False
        self._stopped = False
        self._requests = 0
        self._seen = -_DECODING_S
        self._quiet = deque[tuple[float, float]](maxlen=_WINDOW)
        self._beside = deque[float](maxlen=_WINDOW)
        self._recent = deque[bool](maxlen=4 * _WINDOW)
        """Of the last steps, whether a store ran beside them."""
        self._fresh = 0
        """Steps with a store beside them since the last decision."""
        self.share = 1.0

    # -- the engine's side -----------------------------------------------------------------

    def step(self, requests: int, seconds: float) -> None:
        """A step took so long, in which so many requests got one token each; 0 for all others."""
        now, touched = self._clock(), self._touched
        self._touched = self._active > 0
        if not requests:
            return
        if requests != self._requests or now - self._seen > _FRESH_S:
            self._requests, self._fresh = requests, 0
            self._quiet.clear()
            self._beside.clear()
            self._recent.clear()
        self._seen = now
        self._recent.append(touched)
        if not touched:
            self._quiet.append((now, seconds))
            return
        self._beside.append(seconds)
        self._fresh += 1
        if self._fresh >= _WINDOW:
            self._judge(now, seconds)

    def _judge(self, now: float, seconds: float) -> None:
        """There are enough steps with stores: do they take longer than those without?"""
        self._fresh = 0
        quiet = [taken for at, taken in self._quiet if now - at <= _FRESH_S]
        if len(quiet) < _WINDOW // 2:  # stores are always under way: look at a few steps without
            self._held_until = now + _WINDOW * seconds
            return
        longer = median(self._beside) / median(quiet) - 1
        lost = longer * sum(self._recent) / len(self._recent)
        if lost > LOST_MAX:
            self.share = max(_SHARE_MIN, self.share / 2)
        elif lost < LOST_LITTLE:
            self.share = min(1.0, self.share * 1.25)
        logger.debug("stores cost decoding %.1f %%: %.3f of the time", 100 * lost, self.share)

    def hurry(self, awaited: bool) -> None:
        """The engine waits for stores, or no longer: meanwhile none of them waits."""
        with self._changed:
            self._hurried = awaited
            self._changed.notify_all()

    def stop(self) -> None:
        """No store waits any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # -- the copier's side -----------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Meanwhile a store reads the device, and crosses the link."""
        with self._changed:
            while (delay := self.delay()) and not (self._hurried or self._stopped):
                self._changed.wait(delay)
            self._active += 1
            self._touched = True
        began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                now = self._clock()
                self._next = now + (now - began) * (1 / self.share - 1)
                self._changed.notify_all()

    def delay(self) -> float:
        """For how many seconds a store that would begin now has to wait, or to ask again; 0 if it
        may begin."""
        now = self._clock()
        if now < self._held_until:
            return self._held_until - now
        if self.share == 1 or now - self._seen > _DECODING_S:
            return 0.0
        return _DECODING_S if self._active else max(0.0, self._next - now)
