"""What Ctrl-C or `kill` must not cut in two, like the opening of a stack."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kvtier.cli.console.output import note
from kvtier.cli.signals import ENDING, EXIT_INTERRUPTED

_AGAIN_S = 1.0
"""Ctrl-C so long after the first one is another one: some wrappers pass one on twice."""


@contextmanager
def uninterrupted(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Put Ctrl-C, and what else ends a command, off until the end of the block. It may wait for a
    store that never answers: a terminal is told so, and who presses Ctrl-C again ends it at once,
    like kill -9."""
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
                    note("ending what is under way (Ctrl-C again gives it up)")
            first_at = min(first_at, clock())
        pending.append(number)

    before = {number: signal.signal(number, remember) for number in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in pending[:1]:
        signal.raise_signal(number)
