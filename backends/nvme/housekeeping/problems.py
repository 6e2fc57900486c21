"""What goes wrong with a folder: said once, and no reason to stop the other work."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.errors import MediumError

logger = logging.getLogger(__name__)

_AWAY_S = 3600.0
"""A trouble that comes back after so long is said again."""


class Problems:
    """Logs each problem of a folder once, and again only if it comes back after a long time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._said_at: dict[str, float] = {}

    @contextlib.contextmanager
    def tolerated(
        self, kind: type[Exception] | tuple[type[Exception], ...] = OSError
    ) -> Iterator[None]:
        """Report an error instead of raising it: one strange file must not stop all other work."""
        try:
            yield
        except kind as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        """Log an error of the folder; with a trace if it is none of the disk's."""
        problem = getattr(error, "strerror", 0) or str(error) or type(error).__name__
        trace = None if isinstance(error, (OSError, MediumError)) else error
        self.warn_once(f"NVMe folder {self._root}: {problem}", trace)

    def warn_once(self, message: str, trace: Exception | None = None) -> None:
        """Log a message unless it was logged lately."""
        before, self._said_at[message] = self._said_at.get(message, -_AWAY_S), time.monotonic()
        if self._said_at[message] - before > _AWAY_S:
            logger.warning("%s", message, exc_info=trace)
