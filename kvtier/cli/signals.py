"""What ends a command: Ctrl-C, `kill`, a closed terminal. It imports next to nothing.

Until a command is imported there is nothing to undo, and what ends it ends the process at once. An
exception would come out of the middle of some import, which may print it or make another of it.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What people and services end a command by: Ctrl-C, `kill`, a closed terminal."""

_AGAIN_S = 1.0
"""Ctrl-C so long after the first one is another one: some wrappers pass one on twice."""
_PUT_OFF = "ending what is under way (Ctrl-C again gives it up)"


def leave_at_once() -> None:
    """There is nothing to undo yet."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)


class EndSignal(KeyboardInterrupt):
    """One of the signals that end a command came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_end_signals() -> None:
    """There will be something to undo: from now on what ends a command is an exception."""
    for number in ENDING:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise EndSignal(number)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


@contextmanager
def uninterrupted(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Put Ctrl-C, and what else ends a command, off until the end of the block, which must not be
    cut in two. It may wait for a store that never answers: a terminal is told so, and who presses
    Ctrl-C again ends it at once, like kill -9."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    first_at = math.inf

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if number == signal.SIGINT:
            if clock() >= first_at + _AGAIN_S:
                os._exit(EXIT_INTERRUPTED)
            if not pending:
                with suppress(OSError, RuntimeError):  # the terminal has gone, or it is written to
                    if sys.stderr.isatty():
                        print(f"kvtier: {_PUT_OFF} ...", file=sys.stderr)
            first_at = min(first_at, clock())
        pending.append(number)

    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, remember) for number in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in pending[:1]:
        signal.raise_signal(number)
