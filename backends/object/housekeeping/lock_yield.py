"""Long work beside a busy thread: Python's lock is let go of, again and again.

A thread that wants the lock otherwise waits for five milliseconds each time, and an engine's
scheduler wants it all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_SLICE_S = 0.0004
_PAUSE_S = 0.002
CHUNK = 256
"""So many rows are worked on in about a slice."""


class LockYield:
    """Called all along by long work; from time to time it sleeps, and calls `meanwhile`."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.alone = True
        """There is nobody yet who could be disturbed: do not sleep."""
        self._meanwhile = meanwhile
        self._since = time.perf_counter()

    def __call__(self) -> None:
        if self._is_due():
            self._meanwhile()
            self.rest()

    def rest(self) -> None:
        """Nothing but a pause, if it is due."""
        if self._is_due():
            if not self.alone:
                time.sleep(_PAUSE_S)
            self.begin()

    def _is_due(self) -> bool:
        return time.perf_counter() - self._since > _SLICE_S

    def begin(self) -> None:
        """Something short has been waited for a moment ago."""
        self._since = time.perf_counter()

    def chunks(self, count: int) -> Iterator[slice]:
        """`range(count)` in pieces, with a breath after each."""
        self.begin()
        for start in range(0, count, CHUNK):
            yield slice(start, start + CHUNK)
            self()
