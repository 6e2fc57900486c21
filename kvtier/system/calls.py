"""Calls that may hang run in threads that can be left behind; what was opened together closes."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_S = 0.2


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


class AbandonableCalls:
    """Threads that are kept for calls which may last longer than their callers wait. The thread of
    a call that was left behind is free again when that call ends."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._waiting = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def run(self, call: Callable[[], T], seconds: float) -> T:
        """What the call returns or raises. Raises TimeoutError if it has not ended by then, and
        RuntimeError if there is no thread for it."""
        result: Future[T] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._start()
        self._waiting.put((call, result))
        try:
            return result.result(min(seconds, threading.TIMEOUT_MAX))
        finally:
            del result  # which holds the error, whose traceback holds this frame

    def _start(self) -> None:
        if len(self._threads) >= self._most:
            raise RuntimeError(f"{self._most} calls have not ended")
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            call, result = item
            try:
                answer = partial(result.set_result, call())
            except Exception as error:  # noqa: BLE001 - it is raised where somebody waits
                answer = partial(result.set_exception, error)
            except BaseException:  # this thread ends
                with self._lock, contextlib.suppress(ValueError):
                    self._threads.remove(threading.current_thread())
                result.set_exception(RuntimeError(f"{self._name} has given up"))
                raise
            with self._lock:  # before the caller goes on, who may have another call
                self._idle += 1
            answer()
            del item, call, result, answer  # what they hold belongs to the caller

    def close(self) -> None:
        """End the threads as soon as their calls have ended; waits for a moment only."""
        with self._lock:
            threads, self._threads, self._idle = self._threads, [], 0
        for _ in threads:
            self._waiting.put(None)
        joined(threads, _CLOSE_S)


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


class WaitBound:
    """How long somebody waits for something: an answer of "wait on" holds for so many seconds, and
    then no more, which the log says once."""

    def __init__(
        self, seconds: float, warning: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._warning = warning
        self._clock = clock
        self._since: float | None = None
        self._said = False

    def holds(self, waiting: bool) -> bool:
        """Whether to wait on, where there is something to wait for."""
        if not waiting:
            self._since, self._said = None, False
            return False
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since < self._seconds:
            return True
        if not self._said:
            self._said = True
            logger.error(self._warning, self._seconds)
        return False


def joined(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Wait until threads have ended, at most so long; whether they have."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


class Closable(Protocol):
    """Whatever holds something that others may be waiting for."""

    def close(self) -> None: ...


def close_all(parts: Iterable[Closable]) -> None:
    """Close them, in their order. One that raises, as somebody else's tier may, keeps none of the
    others open; what it raised is raised again in the end."""
    with contextlib.ExitStack() as ending:
        for part in reversed(list(parts)):
            ending.callback(part.close)
