"""Calls that may never return, made in threads of their own: who waits, waits as long as it likes.

Nothing ends a thread that hangs in a call of the system or of others' code. It keeps no process
alive; whoever starts one for the same thing again and again waits until the last is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
