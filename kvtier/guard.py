"""The border between an engine and kvtier, which no exception crosses.

An exception on a scheduler's thread ends the engine, and a cache is not worth that. What is caught
here is a mistake in kvtier: it is logged with its traceback, counted, and answered like a miss.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

logger = logging.getLogger(__name__)

LOGGED_MAX = 20
"""After so many the log has said enough."""

caught = 0
"""How many exceptions have been caught in this process."""

_told = 0


def untold() -> int:
    """How many were caught since the last call. Workers tell the scheduler, who adds up a metric;
    where both are one process, whoever asks first tells."""
    global _told
    new, _told = caught - _told, caught
    return new


def guarded(instead: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Answer `instead()` where the method raises."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            try:
                return method(*arguments, **named)
            except Exception:
                global caught
                caught += 1
                if caught <= LOGGED_MAX:
                    logger.exception("a mistake in kvtier; please report it")
                answer: R = instead()
                return answer

        return call

    return decorate


def never_raising(wrapped: T) -> T:
    """The same object, whose methods answer None where one raises."""
    return cast(T, _Guarded(wrapped))


class _Guarded:
    def __init__(self, wrapped: object) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        @guarded(lambda: None)
        def call(*arguments: Any, **named: Any) -> Any:
            # Found by its name each time, not bound once: tests put others in its place.
            return getattr(self._wrapped, name)(*arguments, **named)

        self.__dict__[name] = call
        return call
