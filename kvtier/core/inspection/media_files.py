"""Files on a medium, as somebody reads them who trusts none of them; and who has locked them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.core.error_texts import naming
from kvtier.types import Namespace

NAMESPACE_ID = re.compile(r"[0-9a-f]{32}")


def standing(folder: Path) -> Path:
    """A tier's folder, or as long as nobody has made it, the one in which it will be."""
    return folder if folder.is_dir() else folder.parent


def read_file(path: Path, most: int, at: int = 0) -> bytes:
    """At most so many bytes of an ordinary file; raises OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(22, "not an ordinary file", str(path))
        pieces = []
        with naming(path):
            while most > 0 and (piece := os.pread(fd, min(most, 1 << 24), at)):
                pieces.append(piece)
                at, most = at + len(piece), most - len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def read_namespace(text: bytes, name: str) -> Namespace | None:
    """A namespace's description, if it is the one that its name says."""
    try:
        namespace = Namespace.from_json(text)
    except msgspec.ValidationError:
        return None
    return namespace if namespace.id == name else None


def size_below(folder: Path) -> int:
    """The bytes of all files below a folder that can be looked at."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


class Locked(NamedTuple):
    """The files that live processes hold an flock on."""

    files: set[tuple[int, int]]
    """Device and inode of each."""
    mounted: set[int]
    """All devices that are mounted."""

    def has(self, path: Path) -> bool:
        """Whether a live process holds this file."""
        try:
            status = path.stat()
        except OSError:
            return False
        if status.st_dev in self.mounted:
            return (status.st_dev, status.st_ino) in self.files
        # Some file systems (btrfs) answer a device here that the kernel's lists do not know.
        return any(inode == status.st_ino for _, inode in self.files)


def locked_files() -> Locked:
    """What is locked now.

    Read from the kernel's list: to try the lock could make an engine that starts just now believe
    that another one is there.
    """
    found = Locked(set(), set())
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_bytes().splitlines():
            words = line.split()
            if words[1] == b"FLOCK":
                major, minor, inode = words[5].split(b":")
                found.files.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    with contextlib.suppress(OSError, ValueError, IndexError):
        # In bytes: a folder may be called anything.
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            major, minor = line.split()[2].split(b":")
            found.mounted.add(os.makedev(int(major), int(minor)))
    return found
