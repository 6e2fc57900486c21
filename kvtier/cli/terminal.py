"""A server in the foreground of a terminal, which Ctrl-C closes and does not just end.

A terminal sends Ctrl-C to every process in its foreground. vLLM's engine takes that as the first
call to stop and the server's own, which follows, as the second: it ends in the middle of closing
its tiers. So the server and all it starts are kept out of the foreground, and it alone is told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from kvtier.cli import console
from kvtier.cli.main import EXIT_INTERRUPTED
from kvtier.move.server import die_with

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
    presses = 0

    def close(number: int, frame: FrameType | None) -> None:
        server.terminate()
        signal.setitimer(signal.ITIMER_REAL, REMIND_S)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            close(number, frame)
            console.note("closing (Ctrl-C again interrupts all of it, and once more kills it)")
        else:
            _tell_all(server, signal.SIGINT if presses == 2 else signal.SIGKILL)

    def pause(number: int, frame: FrameType | None) -> None:
        _tell_all(server, signal.SIGSTOP)
        os.kill(keeper, signal.SIGSTOP)
        _tell_all(server, signal.SIGCONT)

    for number, handler in (
        (signal.SIGINT, interrupt),
        (signal.SIGTERM, close),
        (signal.SIGALRM, close),
        (signal.SIGHUP, close),  # the terminal is gone
        (signal.SIGTSTP, pause),
    ):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)
    code = server.wait()
    if presses:
        return EXIT_INTERRUPTED
    return code if code >= 0 else 128 - code


def _tell_all(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)
