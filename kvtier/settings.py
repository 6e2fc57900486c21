"""The settings that every tier has, and the sizes, durations, rates and secrets in them."""

from __future__ import annotations

import enum
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec

from kvtier.errors import ConfigError, NotWritable

_BINARY = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES = _BINARY | {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_RATE_UNITS = {"day": 86400.0, "d": 86400.0, "h": 3600.0}
_QUANTITY = re.compile(r"([+-]?\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)", re.ASCII)
_SIZE_UNITS = "[KMGT]i?B|B"
_BYTES_MAX = (1 << 63) - 1
_SECONDS_MAX = 100 * 365 * 86400.0
_MEANT = {"k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB"} | {
    "sec": "s", "second": "s", "min": "min", "minute": "min", "hour": "h", "day": "d"
}  # fmt: skip


class Value(ABC):
    """One value of a file: `parse` reads what `str` writes, and `schema` tells editors its form.

    No dataclass: msgspec would write the fields of one, a secret's too, and not ask the hooks.
    """

    __slots__ = ()
    schema: ClassVar[dict[str, Any]]

    @classmethod
    @abstractmethod
    def parse(cls, value: object) -> Self:
        """Read a value of a file; raises ValueError: what is wrong, ";", and what is right."""

    @abstractmethod
    def __str__(self) -> str: ...

    def reveal(self) -> str:
        """As `str`, but a secret itself: for whoever must send it, or sign with it."""
        return str(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.reveal() == self.reveal()

    def __hash__(self) -> int:
        return hash(self.reveal())


def _schema(title: str, number: str, units: str, *examples: str) -> dict[str, Any]:
    """JSON Schema of a number, or of a text with one of these units."""
    text = {"type": "string", "pattern": rf"^\s*\d+(\.\d+)?\s*({units})\s*$"}
    forms = [{"type": number, "minimum": 0}, text]
    return {"title": title, "anyOf": forms, "examples": [*examples]}


def _quantity(value: object, units: Mapping[str, float], what: str) -> Decimal:
    """Read a number and its unit, scaled to the unit whose factor is 1."""
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{_shown(value)} is not {what}; {_form(what, units)}")
    number, unit = Decimal(match.group(1)), match.group(2)
    if number < 0:
        raise ValueError(f"{_shown(value)} is negative; {what} is 0 or more")
    if unit not in units:
        meant = unit.lower().removesuffix("s")
        meant = "min" if unit == "m" and "min" in units else _MEANT.get(meant, unit)
        near = [known for known in units if known.lower() == meant.lower()]
        problem = f"{unit!r} is not a unit of {what}" if unit else f"{_shown(value)} has no unit"
        hint = f'did you mean "{match.group(1)}{near[0]}"?' if near else _form(what, units)
        raise ValueError(f"{problem}; {hint}")
    return number * Decimal(repr(units[unit]))


def _written(number: int | float, units: Mapping[str, float], one: str) -> str:
    """In the largest unit of which it is a whole number, or else in `one`, whose factor is 1."""
    exact = Decimal(repr(number)).normalize()
    for unit, scale in sorted(units.items(), key=itemgetter(1), reverse=True):
        count, rest = divmod(exact, Decimal(repr(scale)))
        if count and not rest:
            return f"{count:f}{unit}"
    return f"{exact:f}{one}"


def _form(what: str, units: Mapping[str, float]) -> str:
    example = '"64GiB"' if units is _BYTES else '"250ms"'
    return f"write {what} as a number and one of {', '.join(units)}, like {example}"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str | int | float):
        return repr(value)[:80]
    return "a list" if isinstance(value, list | tuple) else "a mapping"


class ByteSize(Value):
    """A number of bytes, written like "64GiB" or 1048576."""

    __slots__ = ("bytes",)
    schema = _schema("size", "integer", _SIZE_UNITS, "64GiB", "512MiB")

    def __init__(self, size: int) -> None:
        self.bytes = size

    @classmethod
    def parse(cls, value: object) -> Self:
        if isinstance(value, int) and not isinstance(value, bool):
            size = value
            if size < 0:
                raise ValueError(f"{_shown(value)} is negative; a size is 0 or more")
        else:
            bare = isinstance(value, str) and value.strip().isdecimal()
            size = int(_quantity(f"{value}B" if bare else value, _BYTES, "a size"))
        if size > _BYTES_MAX:
            raise ValueError(f"{_shown(value)} is too large; a size is less than 2**63 bytes")
        return cls(size)

    @classmethod
    def within(cls, size: int) -> Self:
        """The largest short number that is no more than `size`, to be read by people."""
        scale = max((each for each in _BINARY.values() if size >= 10 * each), default=1)
        return cls(size // scale * scale)

    def __str__(self) -> str:
        return _written(self.bytes, _BYTES, "B")


class Capacity(Value):
    """A byte budget: a size, or a share of the medium, written like "80%"."""

    __slots__ = ("share", "size")
    schema = _schema("size or share", "integer", f"{_SIZE_UNITS}|%", "64GiB", "80%")

    def __init__(self, size: ByteSize | None = None, share: float | None = None) -> None:
        self.size = size
        self.share = share

    @classmethod
    def parse(cls, value: object) -> Self:
        if not (isinstance(value, str) and value.strip().endswith("%")):
            return cls(ByteSize.parse(value))
        match = _QUANTITY.fullmatch(value.strip()[:-1])
        if match is None or match.group(2):
            raise ValueError(
                f'{_shown(value)} is not a share; write a number and a percent sign, like "80%"'
            )
        share = float(match.group(1)) / 100
        if not 0 < share <= 1:
            raise ValueError(f"{_shown(value)} is not a share of a medium; write 1% to 100%")
        return cls(share=share)

    def resolve(self, medium_bytes: int) -> int:
        """Bytes, on a medium with `medium_bytes` in all."""
        if self.share is not None:
            return int(medium_bytes * self.share)
        assert self.size is not None
        return self.size.bytes

    def __str__(self) -> str:
        if self.share is None:
            return str(self.size)
        return f"{Decimal(f'{self.share * 100:.12g}'):f}%"  # `parse` knows no exponent


class Duration(Value):
    """A length of time, written like "250ms", "2s" or 1.5 (seconds)."""

    __slots__ = ("seconds",)
    schema = _schema("duration", "number", "us|ms|s|min|h|d", "250ms", "10s")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @classmethod
    def parse(cls, value: object) -> Self:
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = value
            if seconds < 0:
                raise ValueError(f"{_shown(value)} is negative; a duration is 0 or more")
        else:
            seconds = float(_quantity(value, _SECONDS, "a duration"))
        if not seconds <= _SECONDS_MAX:
            raise ValueError(f"{_shown(value)} is too long; a duration is less than 100 years")
        return cls(round(float(seconds), 9))

    def __str__(self) -> str:
        return _written(self.seconds, _SECONDS, "s")


class WriteRate(Value):
    """A number of bytes in a time, written like "2TiB/day" or "50GiB/h"."""

    __slots__ = ("bytes", "unit")
    schema = {
        "title": "size a day or hour",
        "type": "string",
        "pattern": rf"^\s*\d+(\.\d+)?\s*({_SIZE_UNITS})\s*/\s*(day|d|h)\s*$",
        "examples": ["2TiB/day", "50GiB/h"],
    }

    def __init__(self, size: ByteSize, unit: str) -> None:
        self.bytes = size.bytes
        self.unit = unit

    @classmethod
    def parse(cls, value: object) -> Self:
        size, slash, unit = value.partition("/") if isinstance(value, str) else ("", "", "")
        unit = unit.strip()
        if not slash or unit not in _RATE_UNITS:
            raise ValueError(f'{_shown(value)} is no size in a time; write it like "2TiB/day"')
        rate = cls(ByteSize.parse(size), "day" if unit == "d" else unit)
        if not rate.bytes:
            raise ValueError("a budget of nothing; write: never keeps a tier from being written")
        return rate

    @property
    def per_second(self) -> float:
        return self.bytes / _RATE_UNITS[self.unit]

    def __str__(self) -> str:
        return f"{ByteSize(self.bytes)}/{self.unit}"


class Secret(Value):
    """A password, key or token: never shown. Keep it out of the file, like "${SECRET_KEY}"."""

    __slots__ = ("_text",)
    schema = {"title": "secret", "type": "string"}

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def parse(cls, value: object) -> Self:
        if not isinstance(value, str) or not value:
            raise ValueError('a secret is text; write it in quotes, or better "${NAME}"')
        return cls(value)

    def reveal(self) -> str:
        return self._text

    def __str__(self) -> str:
        return "(secret)"


def dec_hook(kind: type[Any], value: object) -> object:
    """Tell msgspec how to read the value types of this file, and paths."""
    if issubclass(kind, Value):
        return kind.parse(value)
    if kind is Path:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError(f"{_shown(value)} is not a path; write a folder or file in quotes")
        return Path(value).expanduser()
    raise TypeError(f"no decoder for {kind.__name__}")


def enc_hook(value: object) -> object:
    """Tell msgspec how to write them so that `dec_hook` reads them again, secrets included."""
    return value.reveal() if isinstance(value, Value) else show_hook(value)


def show_hook(value: object) -> object:
    """Tell msgspec how to write them for people: secrets stay secret."""
    if isinstance(value, Value | Path):
        return str(value)
    raise TypeError(f"no encoder for {type(value).__name__}")


def schema_hook(kind: type[Any]) -> dict[str, Any]:
    """Tell msgspec what they look like in a file."""
    if issubclass(kind, Value):
        return {"description": kind.__doc__, **kind.schema}
    if kind is Path:
        return {"title": "path", "type": "string", "minLength": 1}
    raise TypeError(f"no schema for {kind.__name__}")


Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
"""No medium gains from more, and a machine has only so many."""


class WritePolicy(enum.Enum):
    """When a block that the tier above holds is written to this tier."""

    THROUGH = "through"
    """As soon as the tier above has it, or could not take it; what a kill has prevented follows
    after the restart."""
    ON_EVICT = "on_evict"
    """When the tier above is about to let it go."""
    NEVER = "never"
    """Engines only read this tier; commands may fill it."""


class Admission(enum.Enum):
    """Which of the blocks offered are taken."""

    ALWAYS = "always"
    """Every one."""
    SECOND_TOUCH = "second_touch"
    """Those that are used a second time: it spares the medium what is never asked for again."""


class Persistence(enum.Enum):
    """Whether blocks outlive the process."""

    KEEP = "keep"
    """Yes: the next start serves them."""
    DISCARD = "discard"
    """No: what a process leaves behind is removed."""


class Durability(enum.Enum):
    """What a committed block survives."""

    PROCESS = "process"
    """The death of processes; after a loss of power the block may be a miss."""
    POWER = "power"
    """A loss of power too; every commit waits for the device."""


class Gds(enum.Enum):
    """Whether blocks are read from a local disk straight into GPU memory."""

    AUTO = "auto"
    """Yes, if a real attempt works; otherwise log why not, and go through pinned memory."""
    REQUIRE = "require"
    """Yes, or the engine does not start."""
    OFF = "off"
    """No: always through pinned memory."""


class TierSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """What every tier can be told. Backends derive from it with a tag: their `kind`.

    A text under a field is its description in the reference and in editors.
    """

    capacity: Capacity
    """How many bytes this tier may take in all, at any moment."""
    eviction: str = "adaptive"
    """The eviction policy, by name: it decides which blocks go when the tier is full."""
    write: WritePolicy = WritePolicy.THROUGH
    """When a block that the tier above holds is written to this one."""
    admission: Admission = Admission.ALWAYS
    """Which of the blocks offered are taken."""
    queue_blocks: Count = 4096
    """How many blocks may wait to be moved in or out. Beyond it, stores are dropped and blocks are
    not hits."""
    load_deadline: Duration = Duration(10.0)
    """A load that takes longer is given up, and its blocks are recomputed."""
    store_deadline: Duration = Duration(60.0)
    """A store that takes longer is given up, and its blocks are forgotten."""

    @property
    def kind(self) -> str:
        """The backend's name, as it stands in the file."""
        return str(self.__struct_config__.tag)


def check_capacity(capacity: Capacity, size: int, least: int) -> None:
    """Raise ConfigError if a capacity, which is so many bytes here, is less than a block takes."""
    if size < least:
        # So few bytes are mostly GiB in fact.
        hint = "; a number without a unit is bytes" if size < 4096 else ""
        problem = f"{capacity} holds not one block"
        raise ConfigError(".capacity", problem, f"write at least {least} bytes{hint}")


Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""A part of a whole: 0 is nothing, 1 is all of it."""


class PrefetchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is brought into CPU memory ahead of time. Only an engine that serves does so."""

    waiting: bool = True
    """Whether blocks of lower tiers are brought into CPU memory while their request waits in the
    engine's queue."""
    memory: Share = 0.25
    """The most of CPU memory that such blocks may take until they are used. It shrinks while they
    are not."""
    link: Share = 0.5
    """The most of a lower tier's threads that bring such blocks at a time. Loads of requests that
    are served go first in any case."""
    warmup_share: Share = 0.75
    """How much of CPU memory an engine that starts fills with the hottest blocks of its lower
    tiers, before anybody asks for them; 0 turns this off."""


class RetainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept because a request, a hint or `kvtier pin` asked for it."""

    share: Share = 0.25
    """The most of each tier that retained blocks may take, and 65,536 blocks at most; beyond it
    requests to retain are refused. 0 turns this off."""
    max_ttl: Duration = Duration(3600.0)
    """Upper bound and default of a retention's TTL, counted from the last request for it. What
    `kvtier pin` has pinned stays."""


_SHORT = re.compile(r"^~(?=/|$)|\$([A-Za-z_][A-Za-z0-9_]*)")
"""What a shell would replace."""

WHOSE = "give it to the user of the engines (chown -R), and run what copies into it as that user"
"""What to do about a folder of another user's."""


def standing_folder(folder: Path, place: str, *, only_read: bool = False) -> Path:
    """The folder, or the one it will be made in; raises NotWritable if nothing can be kept there.

    `place` names the setting that it comes from. One that is there may be `only_read`.
    """
    standing = folder if folder.exists() else folder.parent
    if standing is not folder and (short := _SHORT.search(str(folder))):
        meant = _SHORT.sub(lambda found: f"${{{found[1] or 'HOME'}}}", str(folder))
        raise ConfigError(place, f"{short[0]} stands for nothing here", f'write "{meant}"')
    if folder.is_symlink() and standing is not folder:
        problem = f"{folder} is a link to a folder that is not there"
        raise NotWritable(place, problem, f"make {folder.readlink()}, or correct the link")
    if not standing.is_dir():
        raise NotWritable(place, f"{standing} is not a folder", "make it, or name one that exists")
    if only_read and standing is folder:
        return standing
    if not os.access(standing, os.W_OK | os.X_OK):
        read_only = os.statvfs(standing).f_flag & os.ST_RDONLY
        if read_only:
            problem = f"{standing} is mounted read-only"
            raise NotWritable(place, problem, "mount it writable, or name another folder")
        raise NotWritable(place, f"no right to write in {standing}", "change its owner")
    return standing
