"""Work over many items on a few threads, with a bound on what is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_WINDOW = 4
"""Items under way for each thread."""

BYTES_MAX = 512 << 20
"""The memory of all items under way together; one that takes more than this goes alone."""


def bounded_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    bytes_of: Callable[[Item], int],
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in order; ends at once if it is closed or interrupted. `bytes_of`
    says what memory an item takes until its result has been handed out."""
    pool = ThreadPoolExecutor(threads)
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    taken = 0
    try:
        for item in items:
            size = bytes_of(item)
            while waiting and (len(waiting) >= threads * _WINDOW or taken + size > BYTES_MAX):
                first, future = waiting.popleft()
                taken -= bytes_of(first)
                yield first, future.result()
                del future  # which keeps the result
            waiting.append((item, pool.submit(function, item)))
            taken += size
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
            del future
    finally:
        pool.shutdown(cancel_futures=True)
