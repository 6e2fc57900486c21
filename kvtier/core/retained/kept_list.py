"""A tier's list of retained blocks beside its medium: read at the start, written as it changes.

A file system may take its time, so that no engine's thread writes: a keeper does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.core.retained import kept_file
from kvtier.core.retained.retained_blocks import RetainedBlocks
from kvtier.errors import FormatError
from kvtier.system.disk import Disk

logger = logging.getLogger(__name__)

_LEAST_S = 0.05
_SHARE = 50
"""Writing takes at most one part in so many of the time."""
_FAILED_S = 60.0


class KeptList:
    """The file of one list. What cannot be read or written is said once, and is no failure."""

    def __init__(
        self,
        retained: RetainedBlocks,
        path: Path,
        namespace: bytes,
        disk: Disk,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._retained = retained
        self._namespace = namespace
        self._disk = disk
        self._clock = clock
        self._next = 0.0
        self._failed = False

    def begin(self) -> None:
        """Retain what an earlier process has retained."""
        try:
            self._retained.restore(kept_file.read(self.path, self._namespace))
        except (FormatError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            logger.warning("what was retained before is not any more: %s: %s", self.path, reason)

    @property
    def unwritten(self) -> bool:
        """Whether there is something to write, and it can be written."""
        return self._retained.changed and not self._failed

    @property
    def _due(self) -> bool:
        return self._retained.changed and self._clock() >= self._next

    def write(self, *, at_once: bool = False) -> None:
        """Write the list if it has changed, not too often, or `at_once`; not for two threads at the
        same time."""
        if not (self._retained.changed if at_once else self._due):
            return
        began = self._clock()
        try:
            sessions = self._retained.take_all()
            kept_file.write(self._disk, self.path, sessions, self._namespace)
        except OSError as error:
            self._fail(error)
            return
        self._failed = False
        self._next = began + max(_LEAST_S, _SHARE * (self._clock() - began))

    def _fail(self, error: Exception) -> None:
        self._retained.changed = True
        self._next = self._clock() + _FAILED_S
        if not self._failed:
            logger.warning("what is retained is not kept for the next start: %s", error)
        self._failed = True

    def close(self) -> None:
        """Write what has changed; may block."""
        self.write(at_once=True)
