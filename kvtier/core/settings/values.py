"""The value types that stand in a YAML file, read and written as a person would."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Self

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
