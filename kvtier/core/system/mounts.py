"""What kind of file system a folder is on, by what the system says is mounted where."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_OCTAL = re.compile(rb"\\([0-7]{3})")
"""A blank in a name, say, as the kernel writes it there."""


def mounted(folder: Path, root: Path = Path("/")) -> tuple[str, list[str]]:
    """The kind of the file system that a folder is on, and its options; `unknown` if the system
    does not say."""
    real = os.fsencode(folder.resolve())
    best, kind, options = b"", b"unknown", b""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/mounts").read_bytes().split(b"\n")[:-1]:
            words = line.split(b" ")
            point = _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), words[1])
            inside = real == point or real.startswith(point.rstrip(b"/") + b"/")
            if inside and len(point) >= len(best):
                best, kind, options = point, words[2], words[3]
    return os.fsdecode(kind), os.fsdecode(options).split(",")
