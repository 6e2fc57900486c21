"""A server in the foreground of a terminal, which Ctrl-C closes and does not just end.

A terminal sends Ctrl-C to every process in its foreground. vLLM's engine takes that as the first
call to stop and the server's own, which follows, as the second: it ends in the middle of closing
its tiers. So the server and all it starts are kept out of the foreground, and it alone is told.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from kvtier.cli.console.output import note
from kvtier.cli.signals import EXIT_INTERRUPTED
from kvtier.move.process_main import die_with

_CLOSING = "closing (Ctrl-C again interrupts all of it, and once more kills it)"
REMIND_S = 5.0
"""How often the server is told: while vLLM starts, it may forget it."""


def in_foreground() -> bool:
    """Whether what is typed at a terminal, Ctrl-C too, comes to this process."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def run(command: Sequence[str]) -> int:
    """Run a server until it ends, or is told to from here; answers with its exit code."""
    signals = _signal_pipe()
    keeper = os.getpid()

    def stand_apart() -> None:
        die_with(keeper, signal.SIGTERM)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may print, whatever `stty tostop` says

    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # what asks a question from the background is stopped for good
        process_group=0,
        preexec_fn=stand_apart,
    )
    ended = os.pidfd_open(server.pid)
    presses, terminated = 0, False
    while (code := server.poll()) is None:
        ready, _, _ = select.select([signals, ended], [], [], REMIND_S)
        if terminated and not ready:
            server.terminate()
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
                    note(_CLOSING)
    if presses:
        return EXIT_INTERRUPTED
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
