"""Folders in shared memory for tests and benchmarks, which do not outlive them for long.

A process that is killed removes nothing. Shared memory that nobody uses slows down all of the
machine, so each folder names its owner, and whoever makes the next one removes those whose owner is
gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from pathlib import Path

SHARED = Path("/dev/shm")
_NAME = re.compile(r"kvtier-(?:test|bench)-(\d+)-[0-9a-f]+")


def make_memory_folder(kind: str = "test", parent: Path = SHARED) -> Path:
    """A new folder of this process; the caller removes it. `kind` is "test" or "bench"."""
    remove_ownerless(parent)
    folder = parent / f"kvtier-{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    return folder


def remove_ownerless(parent: Path = SHARED) -> None:
    """Remove the folders whose owner has ended."""
    for path in parent.iterdir():
        named = _NAME.fullmatch(path.name)
        if named is not None and not _alive(int(named[1])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):  # another user's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
