"""The parent's end of one mover process: how it is started, spoken to, listened to and ended."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import time

from kvtier.errors import MoverError
from kvtier.move.protocol import Answer, Failed, Hello, Inbox, Ready, answers, frame

log = logging.getLogger(__name__)

OUTGOING_BYTES_MAX = 16 << 20
END_SECONDS = 5.0
"""A killed process is dead within this, but for one that waits for a disk that hangs."""
_RECEIVE_BYTES = 1 << 16


class Link:
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
