"""Calls that may hang run in threads that can be left behind; what was opened together closes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

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


# The end of what was opened together.


class Closable(Protocol):
    """Whatever holds something that others may be waiting for."""

    def close(self) -> None: ...


def close_all(parts: Iterable[Closable]) -> None:
    """Close them, in their order. One that raises, as somebody else's tier may, keeps none of the
    others open; what it raised is raised again in the end."""
    with contextlib.ExitStack() as ending:
        for part in reversed(list(parts)):
            ending.callback(part.close)
