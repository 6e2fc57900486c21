"""Long work beside a busy thread: it gives the GIL up again and again.

A thread that wants the GIL otherwise waits for five milliseconds each time, and an engine's
scheduler wants it all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

_SLICE_S = 0.0004
_PAUSE_S = 0.002
CHUNK = 256
"""About so many rows are worked on in one slice."""


class GilYield:
    """Called all the time by long work. When a slice is over it sleeps, and calls `meanwhile`."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.alone = True
        """No other thread can be disturbed: do not sleep."""
        self._meanwhile = meanwhile
        self._since = time.perf_counter()

    def __call__(self) -> None:
        if self._is_due():
            self._meanwhile()
            self.pause()

    def pause(self) -> None:
        """Sleep if a slice is over, and do not call `meanwhile`."""
        if self._is_due():
            if not self.alone:
                time.sleep(_PAUSE_S)
            self.begin()

    def _is_due(self) -> bool:
        return time.perf_counter() - self._since > _SLICE_S

    def begin(self) -> None:
        """A slice begins: the thread has just waited for something."""
        self._since = time.perf_counter()

    def chunks(self, count: int) -> Iterator[slice]:
        """`range(count)` in pieces, with a call after each."""
        self.begin()
        for start in range(0, count, CHUNK):
            yield slice(start, start + CHUNK)
            self()
