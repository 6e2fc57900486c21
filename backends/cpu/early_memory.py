"""Memory for a region that is about to be made in this process, taken while an engine gets ready.

A worker knows where the region will be and how large before the scheduler knows what it will hold;
in between the engine warms up for seconds. The file has no name until then: if nobody comes for it,
or the process dies, the memory is free again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtier.backends.cpu.region_memory import Memory
from kvtier.system import memory as memory_limits

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_begun: dict[Path, MemoryAhead] = {}
"""By folder."""


class MemoryAhead:
    """A file without a name, and the thread that takes its memory."""

    def __init__(self, folder: Path, size: int, memory: Memory) -> None:
        self.size = size
        self._memory = memory
        self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._thread = threading.Thread(target=self._take, name="kvtier-memory", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system gives no more threads
            os.close(self.fd)
            raise

    def _take(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._memory.shape(self.fd, self.size)

    def end(self) -> int:
        """The file, once nothing is being taken any more."""
        self._thread.join()
        return self.fd


def begin(folder: Path, size: int, near: Sequence[int], *, huge_pages: bool) -> None:
    """Take memory for a region in this folder, if there is room for it."""
    left = memory_limits.memory_left() if memory_limits.in_memory(folder) else None
    if left is None or size > left:
        return
    memory = Memory(folder, near, huge_pages=huge_pages, serving=True)
    with _lock:
        if folder not in _begun:
            with contextlib.suppress(OSError, RuntimeError):
                _begun[folder] = MemoryAhead(folder, size, memory)


def claim(making: Path, size: int) -> int | None:
    """A file of this size under this name, whose memory is there; None if there is none."""
    with _lock:
        begun = _begun.pop(making.parent, None)
    if begun is None:
        return None
    fd = begun.end()
    try:
        if size <= begun.size <= os.fstat(fd).st_size:
            os.ftruncate(fd, size)
            os.link(f"/proc/self/fd/{fd}", making, src_dir_fd=fd)  # else the link is not followed
            return fd
    except OSError as error:
        logger.debug("memory that was taken beforehand cannot be used: %s", error)
    os.close(fd)
    return None


def drop(folder: Path) -> None:
    """Nobody comes for it."""
    with _lock:
        begun = _begun.pop(folder, None)
    if begun is not None:
        os.close(begun.end())
