"""Copies of many pieces in one call: what may do them, how many at once, and what else may."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtier.device.copy_plan import Ints

logger = logging.getLogger(__name__)

BatchCopy = Callable[[Ints, Ints, Ints, bool], object]
"""Queue copies (targets, sources, sizes) on torch's current stream; the flag says that no stream of
the device writes to the sources meanwhile. Returns what must live until they are done."""


_PIECES = 4096
"""Pieces in one call. A driver of CUDA 13.0 crashed over 50,000, which small pages could make."""


def few_at_once(copy: BatchCopy) -> BatchCopy:
    """The same copy, in as many calls as it takes."""

    def split(targets: Ints, sources: Ints, sizes: Ints, quiet_source: bool) -> object:
        if len(sizes) <= _PIECES:
            return copy(targets, sources, sizes, quiet_source)
        cuts = [slice(at, at + _PIECES) for at in range(0, len(sizes), _PIECES)]
        return [copy(targets[cut], sources[cut], sizes[cut], quiet_source) for cut in cuts]

    return split


def or_else(copy: BatchCopy, other: Callable[[], BatchCopy]) -> BatchCopy:
    """The same copy; once it has failed, another one."""
    current = copy
    changing = threading.Lock()

    def tried(targets: Ints, sources: Ints, sizes: Ints, quiet_source: bool) -> object:
        nonlocal current
        way = current
        try:
            return way(targets, sources, sizes, quiet_source)
        except RuntimeError as error:
            if way is not copy:
                raise
            with changing:  # it fails in several threads at once
                if current is copy:
                    logger.warning("copies go another way: %s", error)
                    current = other()
            return current(targets, sources, sizes, quiet_source)

    return tried
