"""What an inspector finds that somebody should see to: for `doctor`, and for `gc`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing has to be done."""
    WARN = "warn"
    """It works, but not as well as it could."""
    BAD = "bad"
    """It will not work."""


class Finding(msgspec.Struct):
    """One thing that was looked at, and what to do about it."""

    area: str
    level: Level
    what: str
    remedy: str = ""


class Garbage(msgspec.Struct):
    """Something that nobody will ask for again. `remove` looks once more whether that still holds,
    and says whether it is gone."""

    what: str
    where: str
    bytes: int
    remove: Callable[[], bool]


def of_file(what: str, path: Path, remove: Callable[[], bool]) -> Iterator[Garbage]:
    """A file that is garbage, unless it was removed since it was listed."""
    with suppress(FileNotFoundError):
        yield Garbage(what, str(path), path.stat().st_size, remove)
