"""Every error that kvtier raises, and what an error of the system means to a person."""

from __future__ import annotations

import copyreg
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What msgspec raises on bytes that are not what they should be: the last on nesting that is too
deep."""


class KVTierError(Exception):
    """Base of all errors that kvtier raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Python would call the class with the message alone, where it wants to be told more.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(KVTierError):
    """The configuration is wrong: `place` names where, the message what and what would be right.

    `line` is where that is in a file, like "stack.yaml:7:5", if it is in one.
    """

    def __init__(self, place: str, problem: str, remedy: str = "", line: str = "") -> None:
        self.place = place
        self.problem = problem
        self.remedy = remedy
        self.line = line
        where = f"{line}: {place}" if line else place
        super().__init__(f"{where}: {problem}" + (f" - {remedy}" if remedy else ""))


class ConfigErrors(ConfigError):
    """Everything that is wrong with a configuration, in the order of the file, at least one."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.place, first.problem, first.remedy, first.line)
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class NotHere(ConfigError):
    """This machine lacks what the configuration names: a folder, or room. Another may have it."""


class NotWritable(NotHere):
    """A place that the configuration names is not there, cannot be written to, or has not the
    room; who only looks needs none of that."""


class BackendError(KVTierError):
    """A kind of tier is not installed, or what its entry point names is not a backend."""


class Unsupported(KVTierError):
    """A kind of tier cannot do what it was asked for: the message says what, and what to do."""


class FormatError(KVTierError):
    """Bytes on a medium are not what kvtier writes, or were written by a newer version."""


class NewerFormat(FormatError):
    """Written by a newer kvtier: to be left alone, not to be mended."""


class MediumError(KVTierError):
    """A medium cannot be opened or used: a missing folder, no rights, no room."""


class MediumInUse(MediumError):
    """A medium, or the name on it, belongs to another live engine."""


class NotResident(KVTierError):
    """A caller asked to load a key that this tier does not hold: look up first."""


class NotOpen(KVTierError):
    """A stack is used that was closed, or that was opened by the process that forked this one."""


class MoverError(KVTierError):
    """The mover cannot be started or reached."""


class ExtraMissing(KVTierError):
    """An optional dependency is needed: the message names the extra to install."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional package: pip install 'kvtier[{extra}]'")


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


def describe_error(error: KVTierError | OSError) -> str:
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
