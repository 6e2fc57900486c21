"""Memory that is taken before it is used, by several threads at once.

What is touched for the first time is found, cleared and mapped by the kernel, page by page: some 2
GB/s by one thread, in the middle of whatever touches it. All of it happens outside Python's lock.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvtier.core.records.record import Buffer
from kvtier.core.system.abandonable_calls import Attempt
from kvtier.core.system.numa import bind_thread

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14: take all of the memory now, and fail where none is left."""
_THREADS = 8
"""More of them wait for each other in the kernel."""
_SLICE_BYTES = 64 << 20
SAY_EVERY_S = 3.0
GIB = 1 << 30


def address_of(memory: Buffer) -> int:
    """Where it begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def system_takes(address: int, size: int) -> bool:
    """Let the system take and map a range now; false if it does not."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return not call(address, size, _POPULATE_WRITE)


class Populating:
    """Takes ranges of addresses, in their order."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        cores: Collection[int] = (),
        take: Callable[[int, int], bool] = system_takes,
        threads: int | None = None,
    ) -> None:
        self._ranges = ranges
        self._cores = cores
        self._take = take
        self._changed = threading.Condition()
        self._next = 0
        self._done = [False] * len(ranges)
        self.whole = True
        """Whether the system has taken all so far."""
        count = threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self._threads = [
            threading.Thread(target=self._run_near, name="kvtier-populate", daemon=True)
            for _ in range(min(count, len(ranges)))
        ]
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                self._threads = self._threads[:started]
                break
        if not self._threads:
            self._run()

    def _run_near(self) -> None:
        with Attempt("memory cannot be taken before it is used"):
            bind_thread(self._cores)
            self._run()
            return
        with self._changed:  # whoever waits for it must not wait for ever
            self.whole = False
            self._end()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                at = self._next
                if at >= len(self._ranges):
                    return
                self._next += 1
            taken = self._take(*self._ranges[at])
            with self._changed:
                self.whole = self.whole and taken
                self._done[at] = True
                if not taken:  # nor will it take the others
                    self._end()
                self._changed.notify_all()

    def _end(self) -> None:
        self._next = len(self._ranges)

    def wait(self, index: int, seconds: float | None = None) -> bool:
        """Whether a range is there, or will not be."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done[index] or not self.whole, seconds)

    def stop(self) -> None:
        """Return when nothing is being taken any more."""
        with self._changed:
            self._end()
        for thread in self._threads:
            thread.join()


def populate(memory: Buffer, what: str, cores: Collection[int] = ()) -> bool:
    """Take all of a mapping's memory; whether the system did. The log says how far it has come."""
    first, size = address_of(memory), len(memory)
    cuts = range(0, size, _SLICE_BYTES)
    ranges = [(first + at, min(_SLICE_BYTES, size - at)) for at in cuts]
    began = time.monotonic()
    populating = Populating(ranges, cores)
    try:
        for index, (address, _) in enumerate(ranges):
            while not populating.wait(index, SAY_EVERY_S):
                logger.info("%s: %.1f of %.1f GiB", what, (address - first) / GIB, size / GIB)
    finally:
        populating.stop()
    seconds = time.monotonic() - began
    if populating.whole and seconds > 1.0:
        logger.info("%s: %.1f GiB in %.1f s", what, size / GIB, seconds)
    return populating.whole
