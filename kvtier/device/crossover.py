"""Up to which size a kernel copies pieces faster than the copy engine: tried on the machine itself.

The engine takes some time for each piece whatever its size, a kernel takes multiprocessors from the
model, and what either reaches depends on link, processor and driver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
BatchCopy = Callable[[Ints, Ints, Ints, bool], object]
"""Queue copies (targets, sources, sizes) on torch's current stream; the flag says that no stream of
the device writes to the sources meanwhile. Returns what must live until they are done."""

SIZES = (4 << 10, 8 << 10, 16 << 10, 32 << 10)
"""Beyond them the link is the limit, and the kernel would only take from the model."""
_BATCH_BYTES = 16 << 20
_BATCHES = 4
"""In a row: as in use, the next is being described while one is being copied."""
_ROUNDS = 4
_WORTH = 0.9
"""The most of the engine's time that the kernel may take: its multiprocessors are the model's."""


class Crossover(NamedTuple):
    """The largest pieces that the kernel copies, by direction; 0 where it copies none."""

    to_device: int = 0
    to_host: int = 0


def crossover(torch: Any, index: int, engine: BatchCopy, kernel: BatchCopy) -> Crossover:
    """Try both on pinned memory, which takes a fraction of a second."""
    trial = _Trial(torch, index)

    def tried(to_host: bool) -> list[tuple[int, float, float]]:
        ways = engine, kernel
        times = [[trial.seconds(way, size, to_host) for size in SIZES] for way in ways]
        return list(zip(SIZES, *times, strict=True))

    found = Crossover(meet(tried(False)), meet(tried(True)))
    logger.info(
        "a kernel copies pieces of up to %d KiB to the device, and of up to %d KiB from it",
        found.to_device >> 10,
        found.to_host >> 10,
    )
    return found


def meet(tried: Sequence[tuple[int, float, float]]) -> int:
    """The last size, from the smallest on, at which the kernel is worth it; of rows of size,
    seconds of the engine, and seconds of the kernel."""
    last = 0
    for size, by_engine, by_kernel in tried:
        if by_kernel > _WORTH * by_engine:
            break
        last = size
    return last


class _Trial:
    """Pinned memory, as much of the device's, and a stream between them."""

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream(index)
        self._host = torch.empty(_BATCH_BYTES, dtype=torch.uint8, pin_memory=True)
        # On the stream that uses it: on another, what was there before may still be in use.
        with torch.cuda.stream(self._stream):
            self._device = torch.empty(_BATCH_BYTES, dtype=torch.uint8, device=f"cuda:{index}")

    def seconds(self, copy: BatchCopy, size: int, to_host: bool) -> float:
        """The shortest of a few tries; others may be at work on the device."""
        steps = np.arange(_BATCH_BYTES // size, dtype=np.int64) * size
        host = self._host.data_ptr() + steps
        device = self._device.data_ptr() + np.random.default_rng(0).permutation(steps)
        targets, sources = (host, device) if to_host else (device, host)
        sizes = np.full_like(steps, size)
        taken = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            with self._torch.cuda.stream(self._stream):
                held = [copy(targets, sources, sizes, not to_host) for _ in range(_BATCHES)]
                self._stream.synchronize()
                del held
            taken.append(time.perf_counter() - started)
        return min(taken)
