"""A disk that reads no faster than it is told, in the mover's process of an engine.

Its interpreter imports `sitecustomize` when it starts: `throttle` writes one that begins it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.slow_proxy import Rate

_CUSTOM = """\
import sys
if "kvtier.move.process_main" in sys.orig_argv:
    sys.path.insert(0, {root!r})
    from benchmarks.engine.throttled_reads import begin
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
