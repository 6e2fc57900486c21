"""Requests side by side, for a caller that waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtier.backends.object.stores.errors import Unavailable

_THREADS = 8
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def in_parallel(work: Callable[[_Item], _Answer], items: Sequence[_Item]) -> list[_Answer]:
    """The answers in order. Where `work` raises, so does this, and what has not begun never does;
    Unavailable where no thread can be started: there are too many, or the interpreter ends."""
    if not items:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(items)), "kvtier-abreast") as threads:
        try:
            answers = threads.map(work, items)
        except RuntimeError as error:
            raise Unavailable(f"no thread can be started: {error}") from error
        return list(answers)
