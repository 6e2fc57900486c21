"""Reads of a mover that are as slow as they are told to be.

A mover's interpreter imports `sitecustomize` when it starts: `throttle` writes one that makes its
reads slow.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Rate:
    """Bytes a second that all who take some share."""

    def __init__(self, bytes_a_second: float) -> None:
        self._each = 1 / bytes_a_second
        self._free = 0.0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Wait until so many bytes have had their time."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - 0.01) + size * self._each
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


_CUSTOM = """\
import sys
if "kvtier.move.process_main" in sys.orig_argv:
    sys.path.insert(0, {root!r})
    from benchmarks.engine.slow import begin
    begin({rate!r})
"""


def throttle(folder: Path, bytes_a_second: float) -> None:
    """Let the movers of engines that are started from now on read so many bytes a second."""
    root = str(Path(__file__).parents[2])
    (folder / "sitecustomize.py").write_text(_CUSTOM.format(root=root, rate=bytes_a_second))
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *known.split(os.pathsep)])


def begin(bytes_a_second: float) -> None:
    """Let all reads of this process together be no faster."""
    from kvtier.system.disk import Disk

    read, rate = Disk.readv, Rate(bytes_a_second)

    def later(*arguments: Any) -> int:
        done = read(*arguments)
        rate.take(done)
        return done

    Disk.readv = later  # type: ignore[assignment, method-assign]
    print(f"reads of {sys.argv[0]} are throttled", file=sys.stderr)
