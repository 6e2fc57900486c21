"""How fast a copy may be."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Keeps a copy below so many bytes a second."""

    def __init__(
        self,
        bytes_per_s: int | None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._clock = clock
        self._due = clock()

    def spend(self, size: int) -> None:
        """Wait until these bytes may be moved."""
        if self.bytes_per_s is None:
            return
        now = self._clock()
        self._due = max(self._due, now) + size / self.bytes_per_s
        self._sleep(self._due - now)
