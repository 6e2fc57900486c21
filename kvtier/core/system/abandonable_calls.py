"""Threads that others wait for: nobody waits for ever, whatever they raise, and if they hang.

Nothing ends a thread that hangs in a call of the system or of others' code. It keeps no process
alive; whoever starts one for the same thing again and again waits until the last is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def abandonable(call: Callable[[], T], name: str) -> Future[T]:
    """What the call returns or raises; RuntimeError if the system gives no thread."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
            answer.set_exception(error)
        finally:
            if not answer.done():
                answer.set_exception(RuntimeError(f"{name} has given up"))

    threading.Thread(target=work, name=name, daemon=True).start()
    return answer


class Attempt:
    """Logs whatever is raised in its block, under a headline, and goes on after the block.

    For threads that others wait for: one that ended would leave them waiting. What follows the
    block tells them that it failed.
    """

    def __init__(self, failure: str) -> None:
        self._failure = failure

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        logger.error("%s", self._failure, exc_info=error)
        return True


def joined(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Wait until threads have ended, at most so long; whether they have."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
