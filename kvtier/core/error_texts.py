"""What an error of the system means to a person, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import KVTierError

MORE_MEMORY = "free some, or raise the limit (ulimit -v, or the container's)"
_REMEDIES = {
    errno.EACCES: "run this as its owner, or change its rights",
    errno.EPERM: "run this as its owner",
    errno.EIO: "its disk may be failing: see dmesg",
    errno.EBADMSG: "its file system is damaged: see dmesg",
    errno.EUCLEAN: "its file system is damaged: see dmesg",
    errno.ENOENT: "name one that exists",
    errno.ENOTDIR: "name one in a folder that exists",
    errno.EISDIR: "name a file",
    errno.ENAMETOOLONG: "name a shorter one",
    errno.ENOTCONN: "mount it again",
    errno.ESTALE: "mount it again",
    errno.ENOSPC: "free some room there",
    errno.EDQUOT: "free some room there",
    errno.ENOMEM: MORE_MEMORY,
    errno.EMFILE: "raise the limit: ulimit -n",
    errno.EFBIG: "raise the limit: ulimit -f unlimited",
    errno.EROFS: "name a place that can be written to",
}


def said_of(error: KVTierError | OSError) -> str:
    """What went wrong, and what to do."""
    if not isinstance(error, OSError):
        return str(error)
    name = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{name}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


@contextmanager
def naming(place: str | Path) -> Iterator[None]:
    """What fails here says where, though only an error in opening a file brings its name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(place)
        raise
