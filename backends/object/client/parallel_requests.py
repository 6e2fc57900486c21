"""Several requests at once, for a caller that waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtier.backends.object.stores.errors import Unavailable

_THREADS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """The results in order. If `work` raises, so does this, and no further item is begun. Raises
    Unavailable if no thread can be started: there are too many, or the interpreter ends."""
    if not items:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(items)), "kvtier-requests") as threads:
        try:
            results = threads.map(work, items)
        except RuntimeError as error:
            raise Unavailable(f"no thread can be started: {error}") from error
        return list(results)
