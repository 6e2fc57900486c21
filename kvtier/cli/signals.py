"""What ends a command: Ctrl-C, `kill`, a closed terminal. It imports next to nothing.

Until a command is imported there is nothing to undo, and what ends it ends the process at once. An
exception would come out of the middle of some import, which may print it or make another of it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What people and services end a command by: Ctrl-C, `kill`, a closed terminal."""


class EndSignal(KeyboardInterrupt):
    """One of these signals came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def leave_at_once() -> None:
    """There is nothing to undo yet."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)


def begin() -> None:
    """There will be something to undo: from now on what ends a command is an exception."""
    for number in ENDING:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise EndSignal(number)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
