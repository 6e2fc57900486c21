"""Runs a server below this process: hands signals on, says when it is up, leaves nothing behind.

vLLM's server starts an engine, which starts workers. A signal to their whole group, as a terminal
or a service manager sends it, is the first call to stop for the engine, and the server's own, which
follows, is the second: it ends in the middle of closing its tiers. And a server that is told to end
while it starts goes at once, and leaves the engine waiting for it for ever. So the server and all
that it starts are in a group of their own, the server alone is told, and what outlives it comes to
this process, which ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvtier import amounts
from kvtier.cli import console
from kvtier.cli.signals import EXIT_INTERRUPTED
from kvtier.move.process_main import die_with

REMIND_S = 5.0
"""How often a server that was told to close is told again: while vLLM starts, it may forget it."""
LEFT_S = 30.0
"""What outlives the server has so long to close, and is killed then."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_LOOK_S = 1.0
_SAY_S = 15.0
_CLOSING = "closing (Ctrl-C again interrupts all of it, and once more kills it)"


def run_server(command: Sequence[str], is_up: Callable[[], bool] = lambda: False) -> int:
    """Run a server until it ends, or is told to from here; answers with its exit code. All of its
    processes have ended then. A terminal is told how long the start takes."""
    signals = _signal_pipe()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor, others = os.getpid(), _children()

    def stand_apart() -> None:
        die_with(supervisor, signal.SIGTERM)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may print, whatever `stty tostop` says

    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # what asks a question from the background is stopped for good
        process_group=0,
        preexec_fn=stand_apart,
    )
    try:
        return _supervise(server, signals, _Start(is_up))
    finally:
        _end_all(others)


class _Start:
    """Tells a terminal how long a server starts, and when it is up."""

    def __init__(self, is_up: Callable[[], bool]) -> None:
        self._is_up = is_up
        self._begin = time.monotonic()
        self._say_at = _SAY_S
        self.done = not sys.stderr.isatty()

    def look(self) -> None:
        """Look whether it is up by now, and say so."""
        taken = time.monotonic() - self._begin
        if not self.done and self._is_up():
            self.done = True
            console.warn(f"the server is up, after {amounts.duration(round(taken))}")
        elif not self.done and taken >= self._say_at:
            self._say_at = taken + _SAY_S
            console.warn(f"vLLM starts ({amounts.duration(round(taken))} so far)")


def _supervise(server: subprocess.Popen[bytes], signals: int, start: _Start) -> int:
    ended = os.pidfd_open(server.pid)
    presses, terminated = 0, False
    while (code := server.poll()) is None:
        wait = REMIND_S if terminated or start.done else _LOOK_S
        ready, _, _ = select.select([signals, ended], [], [], wait)
        if not ready:
            server.terminate() if terminated else start.look()
        for number in os.read(signals, 64) if signals in ready else b"":
            presses += number == signal.SIGINT
            if number == signal.SIGTSTP:
                _pause(server)
            elif number == signal.SIGINT and presses > 1:
                _signal_all(server, signal.SIGINT if presses == 2 else signal.SIGKILL)
            else:
                server.terminate()
                terminated = True
                if number == signal.SIGINT:
                    console.note(_CLOSING)
    os.close(ended)
    if presses:
        return EXIT_INTERRUPTED
    if terminated and code == -signal.SIGTERM:
        return 0  # it ended as it was told; of a reminder it dies, if that comes at the very end
    return code if code >= 0 else 128 - code


def _signal_pipe() -> int:
    """From where the numbers of signals can be read from now on; none is lost, or comes while
    nobody expects it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: None)
    return reader


def _pause(server: subprocess.Popen[bytes]) -> None:
    _signal_all(server, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    _signal_all(server, signal.SIGCONT)


def _signal_all(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)


# -- what outlives the server ----------------------------------------------------------------------


def _end_all(spared: Collection[int]) -> None:
    """Wait until all that the server has started is gone. Its orphans are this process's children,
    beside those that are `spared`; they are told to end at once, and killed if they do not."""
    told: set[int] = set()
    kill_at = time.monotonic() + LEFT_S
    while left := _children().difference(spared):
        overdue = time.monotonic() > kill_at
        for child in left:
            if not os.waitpid(child, os.WNOHANG)[0] and (overdue or child not in told):
                told.add(child)
                os.kill(child, signal.SIGKILL if overdue else signal.SIGTERM)
        time.sleep(_POLL_S)


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything, also half of a letter: state, parent.
            _, parent, *_ = stat.read_bytes().rpartition(b")")[2].split()
            if int(parent) == os.getpid():
                found.add(int(stat.parent.name))
    return found
