"""Opening stacks so that Ctrl-C or `kill`, at whatever instant, leaves nothing half open."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvtier.cli.main import ENDING
from kvtier.stack import Stack


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C, and what else ends a command, off until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    before = {number: signal.signal(number, remember) for number in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in pending[:1]:
        signal.raise_signal(number)


@contextmanager
def opened(
    open_it: Callable[[], Stack], leave: Callable[[Stack], None] | None = None
) -> Iterator[Stack]:
    """A stack, and what is to be done with it before it is closed."""
    stack: Stack | None = None
    try:
        with uninterrupted():
            stack = open_it()
        yield stack
    finally:
        if stack is not None:
            with uninterrupted():
                try:
                    if leave is not None:
                        leave(stack)
                finally:
                    stack.close()
