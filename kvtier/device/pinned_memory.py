"""Host memory that a device can reach directly: registered in pieces, as many as it gets."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from kvtier.core.records.record import Buffer

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""While the driver pins, what else wants its locks waits, the engine's own calls and those of other
ranks too: some milliseconds for so much. Drivers and kernels have also refused large ranges."""


class Registrar(Protocol):
    """The driver's two calls."""

    def register(self, address: int, size: int) -> str | None:
        """Pin a range; the reason if the driver refuses."""

    def unregister(self, address: int) -> None:
        """Give it back."""


class PinnedMemory:
    """A region's slots, to be pinned until this is closed.

    Pieces end where slots end, so that no copy crosses from one into the next, and where a page of
    the system does, because the driver pins whole pages, and refuses one that it has. If a piece is
    refused, copies from and to the rest go through the driver's own buffers, which works and is
    slower. Those before are kept: copies use them by now, and must not lose memory on their way.
    """

    def __init__(
        self,
        data: Buffer,
        slot_bytes: int,
        registrar: Registrar,
        piece_bytes: int = PIECE_BYTES,
        page_bytes: int = mmap.PAGESIZE,
    ) -> None:
        self._registrar = registrar
        self._addresses: list[int] = []
        self._base = int(np.frombuffer(data, np.uint8).ctypes.data)
        self._size = len(data)
        self._slot_bytes = slot_bytes
        self._page_bytes = page_bytes
        self._step = max(piece_bytes // slot_bytes, 1) * slot_bytes

    def pin(self, stopping: threading.Event | None = None) -> bool:
        """Register all of it; whether the device reaches it directly now. That takes a while, half
        of which is left to others, and ends early if it is to stop."""
        stopping = stopping or threading.Event()
        for at, size in self._pieces():
            began = time.monotonic()
            reason = self._registrar.register(self._base + at, size)
            if reason is not None:
                logger.warning(
                    "%d of the CPU region's %d bytes stay pageable, so that their copies are "
                    "slower: pinning more was refused (%s). Raise the memlock limit (ulimit -l), "
                    "or make the cpu tier's capacity smaller",
                    self._size - at,
                    self._size,
                    reason,
                )
                return False
            self._addresses.append(self._base + at)
            if stopping.wait(time.monotonic() - began):
                return False
        return True

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Where each begins, and how long it is: all that is left, if no slot ends with a page."""
        at = 0
        while at < self._size:
            end = at + self._step
            while end < self._size and (self._base + end) % self._page_bytes:
                end += self._slot_bytes
            end = min(end, self._size)
            yield at, end - at
            at = end

    def close(self) -> None:
        """Give all pieces back, the last one first; nothing may be copying any more."""
        while self._addresses:
            self._registrar.unregister(self._addresses.pop())
