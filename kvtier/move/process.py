"""The mover in a process of its own: starts, hears, restarts and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from kvtier.errors import MoverError
from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.mover import Mover, MoverStats, Transfer, TransferKind, TransferResult
from kvtier.move.protocol import (
    Answer,
    Cancel,
    Failed,
    Hasten,
    Hello,
    Inbox,
    Ready,
    Submit,
    TierOpening,
    TransferEnded,
    answers,
    frame,
)
from kvtier.move.queues import STAGING_BYTES, TransferCounts
from kvtier.settings import TierSettings
from kvtier.system.calls import Attempt
from kvtier.types import Outcome

log = logging.getLogger(__name__)

START_GRACE_SECONDS = 10.0
"""Who opens a mover waits no longer than this for what the system does to start a process."""
CLOSE_SECONDS = 2.0
"""Who closes waits no longer for what is being moved: it is not done, and is done again."""
CLOSED_END_SECONDS = 1.0
"""Nor for a process that is killed then and waits for its disk."""
BACKOFF_SECONDS = 0.1
BACKOFF_SECONDS_MAX = 5.0
_TICK_SECONDS = 0.25
OUTGOING_BYTES_MAX = 16 << 20
END_SECONDS = 5.0
"""A killed process is dead within this, but for one that waits for a disk that hangs."""
_RECEIVE_BYTES = 1 << 16


class MoverConnection:
    """A running mover process. Nothing here blocks but `start` and `end`.

    Not locked: `ProcessMover` calls it under its own lock, except for `start`, `watch` and `end`.
    """

    def __init__(self) -> None:
        self.gone = False
        """The process has closed its end: it is dead, or about to be."""
        self._inbox = Inbox()
        self._outgoing = bytearray()
        try:
            self.socket, theirs = socket.socketpair()
        except OSError as error:
            raise MoverError(f"there is no socket for the mover's process: {error}") from error
        try:
            self._process = self._spawn(theirs.fileno())
        except OSError as error:
            self.socket.close()
            raise MoverError(f"the mover's process cannot be started: {error}") from error
        finally:
            theirs.close()
        self.socket.setblocking(False)

    @staticmethod
    def _spawn(end: int) -> subprocess.Popen[bytes]:
        """The process finds its end of the socket by number and learns everything else over it, so
        that no setting shows in a list of processes. It has a group of its own: Ctrl-C in the
        terminal is for the parent, which ends the mover when it is done with it. And it looks for
        modules where they are installed, not in whatever folder it is started in (-P)."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "kvtier.move.process_main", str(end), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints must not mix with the output of a command
            pass_fds=[end],
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def pending(self) -> bool:
        """Whether something waits until the socket can be written to again."""
        return bool(self._outgoing)

    def start(self, hello: Hello, seconds: float, interrupt: int) -> Ready:
        """Have it open its tiers; raises MoverError if it cannot, not in time, or interrupted."""
        self.send(frame(hello))
        until = time.monotonic() + seconds
        while True:
            self.flush()
            if self.watch(until - time.monotonic(), interrupt, reading=True):
                raise MoverError("the mover was closed while its process started")
            if messages := self.receive():
                break
            if self.gone:
                raise MoverError(
                    f"the mover's process ended at its start with status {self.end()}; "
                    "what it wrote to stderr says why"
                )
            if time.monotonic() >= until:
                raise MoverError(
                    f"the mover's process did not open its tiers within {seconds:g} s; "
                    "look at the media they lie on"
                )
        answer = messages[0]
        if isinstance(answer, Failed):
            raise MoverError(f"the mover's process cannot open its tiers: {answer.problem}")
        if not isinstance(answer, Ready):
            raise MoverError("the mover's process did not say that it is ready")
        return answer

    def send(self, data: bytearray) -> bool:
        """Send a frame as far as the socket takes it and keep the rest; False if that is full."""
        if self.gone or (self._outgoing and len(self._outgoing) + len(data) > OUTGOING_BYTES_MAX):
            return False
        self._outgoing += data
        self.flush()
        return True

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._outgoing and not self.gone:
            try:
                sent = self.socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                self.gone = True
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Answer]:
        """What has arrived; sets `gone` at the end of the stream, or when it is no stream of ours.

        What had arrived before the end is still to be had when the process is dead.
        """
        messages: list[Answer] = []
        while True:
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
                messages.extend(self._inbox.feed(data, answers))
            except BlockingIOError:
                return messages
            except OSError:
                data = b""
            except MoverError as error:
                log.error("the mover's process is not to be trusted any more: %s", error)
                data = b""
            if not data:
                self.gone = True
                return messages

    def watch(self, seconds: float, waker: int, *, reading: bool = False) -> bool:
        """Sleep until the process is gone, can be written to again (if that is waited for), the
        waker is set (which is the answer) or, if asked for, something has arrived."""
        poll = select.poll()
        events = select.POLLRDHUP | (select.POLLIN if reading else 0)
        poll.register(self.socket, events | (select.POLLOUT if self._outgoing else 0))
        poll.register(waker, select.POLLIN)
        return any(found == waker for found, _ in poll.poll(max(0.0, seconds) * 1000))

    def hang_up(self) -> None:
        """Ask the process to end: it cancels what has not started and reports what has."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.gone = True

    def end(self, seconds: float = END_SECONDS) -> int | None:
        """Kill the process if it lives, and see it dead: nothing of it writes anywhere any more.
        None if it is not dead yet: the kernel lets it wait for its disk first."""
        self._process.kill()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Let go of the socket; the process has been ended."""
        self.socket.close()


class Flight(msgspec.Struct, frozen=True):
    """A transfer that the process has."""

    transfer: Transfer
    submitted: float
    result_due: float


class ProcessMover(Mover):
    """Carries transfers out in another process, and starts that again when it dies.

    Callers write to and read from its socket themselves, without waiting: no thread of this
    process has to run for a transfer to go out or a result to come in. One thread, the supervisor,
    sleeps beside it. It starts the process (which dies with that thread, and so with this
    process), sees its death, and kills it when a result is later than it can be: later than the
    transfer's deadline, the longest call of its handlers (`Handler.call_seconds`) and
    `grace_seconds` together. It kills it, too, after a mistake of its own. Only when the process is
    dead beyond doubt does what it had in flight end, as DROPPED or TIMEOUT, because a result
    promises that nothing writes to its target any more.
    """

    def __init__(
        self,
        tiers: Sequence[TierSettings],
        context: TierContext,
        *,
        staging_bytes: int = STAGING_BYTES,
        prefetch_share: float = 0.5,
        start_seconds: float = 30.0,
        grace_seconds: float = 1.0,
    ) -> None:
        self._hello = Hello(
            context,
            [TierOpening.of(tier) for tier in tiers],
            staging_bytes,
            logging.getLogger("kvtier").getEffectiveLevel(),
            prefetch_share,
        )
        self._queue_blocks = [tier.queue_blocks for tier in tiers]
        self._start_seconds = start_seconds
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._waiting = threading.Lock()
        """Held by whoever is in `wait`."""
        # Both are known once the first process has opened its tiers.
        self._books: TransferCounts
        self._call_seconds: dict[TransferKind, list[float]]
        self._link: MoverConnection | None = None
        """None while there is no process."""
        self._lost = False
        """Nor will there be one in a moment."""
        self._flights: dict[int, Flight] = {}
        self._results: list[TransferResult] = []
        self._closed = False
        self._closed_at = float("inf")
        self._failure: MoverError | None = None
        self._started = threading.Event()
        with contextlib.ExitStack() as opened:  # if the system gives no more files, or threads
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            """Set when the supervisor has something to do: to send what the socket did not take, or
            to end."""
            opened.callback(os.close, self._wake)
            self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            """Set while there are results that the supervisor took in, and nobody has polled."""
            opened.callback(os.close, self._ready)
            self._arrivals = opened.enter_context(select.epoll())
            """What `wait` sleeps on: `_ready`, and the socket, on which results arrive."""
            self._arrivals.register(self._ready, select.EPOLLIN)
            self._supervisor = threading.Thread(
                target=self._supervise, name="kvtier-mover-supervisor", daemon=True
            )
            self._supervisor.start()
            opened.pop_all()
        self._await_start()

    def _await_start(self) -> None:
        seconds = self._start_seconds + END_SECONDS + START_GRACE_SECONDS
        if not self._started.wait(seconds):
            self._failure = MoverError(f"the mover's process did not start within {seconds:g} s")
        if self._failure is not None:
            self._closed = True
            self._end_supervisor()
            raise self._failure

    @property
    def pid(self) -> int | None:
        """The process that moves bytes now; None while there is none."""
        with self._lock:
            return self._link.pid if self._link is not None else None

    @property
    def down(self) -> bool:
        return self._link is None

    @property
    def lost(self) -> bool:
        return self._lost

    def submit(self, transfer: Transfer) -> bool:
        with self._lock:
            link = self._link
            if link is None or self._closed:
                return False
            if transfer.id in self._flights:
                raise ValueError(f"transfer {transfer.id} is in flight already")
            if not (lanes := self._books.admit(transfer)):
                return False
            if not link.send(frame(Submit.of(transfer))):
                self._books.release(transfer)
                return False
            longest = self._call_seconds[transfer.kind]
            late = max(longest[lane] for lane in lanes) + self._grace_seconds
            flight = Flight(transfer, time.monotonic(), transfer.deadline + late)
            self._flights[transfer.id] = flight
            self._push(link)
        return True

    def poll(self) -> list[TransferResult]:
        with self._lock:
            if self._link is not None and self._flights:
                self._absorb(self._link)
            if not self._results:
                return []
            if not self._closed:
                _reset(self._ready)
            results, self._results = self._results, []
        return results

    def wait(self, seconds: float) -> bool:
        # One waiter at a time, so that `close` knows when nobody looks at the descriptors.
        if not self._waiting.acquire(timeout=seconds):
            return False
        try:
            with self._lock:
                if self._results or self._closed:
                    return bool(self._results)
            return bool(self._arrivals.poll(seconds))
        finally:
            self._waiting.release()

    def cancel(self, ids: Sequence[int]) -> None:
        with self._lock:
            known = [each for each in ids if each in self._flights]
            if known and self._link is not None:
                self._link.send(frame(Cancel(known)))
                self._push(self._link)

    def hasten(self, ids: Sequence[int]) -> None:
        with self._lock:
            known = [self._flights[each].transfer for each in ids if each in self._flights]
            ahead = [transfer for transfer in known if transfer.prefetch]
            for transfer in ahead:
                self._books.hasten(transfer)
            if ahead and self._link is not None:
                self._link.send(frame(Hasten([transfer.id for transfer in ahead])))
                self._push(self._link)

    def stats(self) -> MoverStats:
        with self._lock:
            return self._books.stats()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._closed_at = time.monotonic()
            if self._link is not None:
                self._link.hang_up()
        self._end_supervisor()

    def _push(self, link: MoverConnection) -> None:
        """Under the lock: what the socket did not take is the supervisor's to send."""
        if link.pending:
            os.eventfd_write(self._wake, 1)

    def _absorb(self, link: MoverConnection) -> None:
        """Under the lock: take in what the process has reported."""
        for message in link.receive():
            if not isinstance(message, TransferEnded):
                continue
            for result in message.results:
                flight = self._flights.pop(result.id, None)
                if flight is not None:
                    self._books.release(flight.transfer, result.outcomes)
                    self._results.append(result)

    def _end_supervisor(self) -> None:
        """Wait for it, but not for ever: it may wait for the system. Then it keeps what it uses."""
        os.eventfd_write(self._wake, 1)
        self._supervisor.join(CLOSE_SECONDS + CLOSED_END_SECONDS + START_GRACE_SECONDS)
        if self._supervisor.is_alive():
            log.error("the mover's supervisor does not end: the system does not answer it")
            return
        os.eventfd_write(self._ready, 1)
        with self._waiting:
            self._arrivals.close()
            os.close(self._ready)
            os.close(self._wake)

    # ---- the supervisor's thread

    def _supervise(self) -> None:
        backoff = BACKOFF_SECONDS
        while not self._closed:
            began = time.monotonic()
            with Attempt("a mistake in the mover's supervisor, which starts its process again"):
                self._run_process()
            if not self._started.is_set():
                self._failure = self._failure or MoverError(
                    "the mover's process cannot be started; the log says why"
                )
                self._started.set()
                return
            if time.monotonic() - began > BACKOFF_SECONDS_MAX:
                backoff = BACKOFF_SECONDS
            self._pause(backoff)
            backoff = min(2 * backoff, BACKOFF_SECONDS_MAX)

    def _run_process(self) -> None:
        """Start a process, and see it to its end: whatever is raised, it is dead then, and nothing
        is in flight."""
        try:
            link = self._start()
        except (MoverError, OSError) as error:
            self._lost = True
            if not self._started.is_set():
                self._failure = MoverError(str(error))
            elif not self._closed:
                log.error("the mover cannot be started again, will try on: %s", error)
            return
        self._started.set()
        try:
            self._watch(link)
        finally:
            self._bury(link)

    def _start(self) -> MoverConnection:
        """Start a process and make it the one that submissions go to."""
        _reset(self._wake)  # from here on it is set by `close` alone
        if self._closed:
            raise MoverError("the mover was closed before its process started")
        link = MoverConnection()
        try:
            ready = link.start(self._hello, self._start_seconds, self._wake)
            self._arrivals.register(link.socket, select.EPOLLIN)
        except BaseException:
            self._lost = True
            link.end()
            link.close()
            raise
        with self._lock:
            if self._started.is_set():
                self._books.restarted()
            else:
                self._books = TransferCounts(ready.host, self._queue_blocks)
                self._call_seconds = ready.call_seconds
            self._link, self._lost = link, False
            if self._closed_at < float("inf"):  # meanwhile, which nobody has told this process
                link.hang_up()
        return link

    def _watch(self, link: MoverConnection) -> None:
        """Return when this process is gone, or has to be ended."""
        while True:
            before = time.monotonic()
            link.watch(_TICK_SECONDS, self._wake)
            _reset(self._wake)
            with self._lock:
                link.flush()
                self._absorb(link)
                if self._results:
                    os.eventfd_write(self._ready, 1)
                now = time.monotonic()
                if link.gone:
                    return
                if now > self._closed_at + CLOSE_SECONDS:
                    log.error("the mover's process %d does not end and is killed", link.pid)
                    return
                # When we have overslept ourselves, everything may have been stopped together, and
                # the process deserves a moment to catch up.
                if now - before < 2 * _TICK_SECONDS and self._overdue(now):
                    log.error("the mover's process %d does not answer and is killed", link.pid)
                    return

    def _overdue(self, now: float) -> bool:
        return any(flight.result_due < now for flight in self._flights.values())

    def _bury(self, link: MoverConnection) -> None:
        """See the process dead, take in what it said last, and end what it had in flight."""
        with self._lock:
            self._link = None
            self._arrivals.unregister(link.socket)
        while (status := link.end(CLOSED_END_SECONDS if self._closed else END_SECONDS)) is None:
            self._lost = True
            if self._closed:  # nobody takes results any more, and no disk is worth waiting for
                log.error("the mover's process %d cannot be ended: its disk hangs", link.pid)
                link.close()
                return
        if not self._closed:
            log.error("the mover's process %d ended with status %d", link.pid, status)
        with self._lock:
            with Attempt("what the mover's process said last is not understood"):
                self._absorb(link)
            now = time.monotonic()
            for flight in self._flights.values():
                transfer = flight.transfer
                late, seconds = transfer.deadline <= now, now - flight.submitted
                outcome = Outcome.TIMEOUT if late else Outcome.DROPPED
                result = TransferResult(
                    id=transfer.id,
                    outcomes=[Outcome.CANCELLED if self._closed else outcome] * len(transfer.keys),
                    bytes_moved=0,
                    seconds=seconds,
                    # It was moving: what is late in a queue, the process itself ends.
                    busy_seconds=seconds if late else 0.0,
                )
                self._books.release(transfer, result.outcomes)
                self._results.append(result)
            self._flights.clear()
            if self._results:
                os.eventfd_write(self._ready, 1)
        link.close()

    def _pause(self, seconds: float) -> None:
        """Wait between two starts, unless closed meanwhile."""
        if not self._closed:
            waker = select.poll()  # `select` knows no descriptor beyond 1023
            waker.register(self._wake, select.POLLIN)
            waker.poll(seconds * 1000)


def _reset(event: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(event)
