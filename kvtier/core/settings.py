"""The settings that every tier has, and the value types that stand in a YAML file."""

from __future__ import annotations

import enum
import re

import msgspec

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class ByteSize:
    """A number of bytes, written like "64GiB" or 1048576."""

    __slots__ = ("bytes",)

    def __init__(self, size: int) -> None:
        self.bytes = size

    @classmethod
    def parse(cls, text: object) -> ByteSize:
        """Read "1.5GiB" or a plain number of bytes; raises ValueError with what would be right."""
        if isinstance(text, int) and not isinstance(text, bool):
            size: float = text
        else:
            match = _SIZE.fullmatch(str(text).strip())
            unit = match.group(2) if match else ""
            scale = _UNITS.get(unit) or _DECIMAL.get(unit)
            if match is None or scale is None:
                raise ValueError(
                    f"{text!r} is not a size; write a number and one of B, KiB, MiB, GiB, TiB "
                    '(or KB, MB, GB, TB), like "64GiB"'
                )
            size = float(match.group(1)) * scale
        if size < 0:
            raise ValueError(f"{text!r} is negative; a size is 0 or more")
        return cls(int(size))

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self.bytes and self.bytes % _UNITS[unit] == 0:
                return f"{self.bytes // _UNITS[unit]}{unit}"
        return f"{self.bytes}B"

    def __repr__(self) -> str:
        return f"ByteSize({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteSize) and other.bytes == self.bytes

    def __hash__(self) -> int:
        return hash(self.bytes)


class Capacity:
    """A byte budget: a size, or a share of the medium, written like "80%"."""

    __slots__ = ("share", "size")

    def __init__(self, size: ByteSize | None = None, share: float | None = None) -> None:
        self.size = size
        self.share = share

    @classmethod
    def parse(cls, text: object) -> Capacity:
        """Read "64GiB" or "80%"; raises ValueError with what would be right."""
        if isinstance(text, str) and text.strip().endswith("%"):
            number = text.strip()[:-1].strip()
            try:
                share = float(number) / 100
            except ValueError:
                raise ValueError(
                    f'{text!r} is not a share; write a number and %, like "80%"'
                ) from None
            if not 0 < share <= 1:
                raise ValueError(f"{text!r} is not a share of a medium; write 1% to 100%")
            return cls(share=share)
        return cls(ByteSize.parse(text))

    def resolve(self, medium_bytes: int) -> int:
        """Bytes, on a medium with `medium_bytes` in all."""
        if self.share is not None:
            return int(medium_bytes * self.share)
        assert self.size is not None
        return self.size.bytes

    def __str__(self) -> str:
        return str(self.size) if self.share is None else f"{self.share * 100:g}%"

    def __repr__(self) -> str:
        return f"Capacity({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Capacity) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash(str(self))


class Duration:
    """A length of time, written like "250ms", "2s" or 1.5 (seconds)."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read "250ms" or seconds; raises ValueError with what would be right."""
        if isinstance(text, int | float) and not isinstance(text, bool):
            seconds = float(text)
        else:
            match = _SIZE.fullmatch(str(text).strip())
            if match is None or match.group(2) not in _SECONDS:
                raise ValueError(
                    f"{text!r} is not a duration; write a number and one of us, ms, s, min, h, d, "
                    'like "250ms"'
                )
            seconds = float(match.group(1)) * _SECONDS[match.group(2)]
        if seconds < 0:
            raise ValueError(f"{text!r} is negative; a duration is 0 or more")
        return cls(seconds)

    def __str__(self) -> str:
        for unit in ("d", "h", "min", "s", "ms", "us"):
            count = self.seconds / _SECONDS[unit]
            if count >= 1 and abs(count - round(count)) < 1e-9:
                return f"{round(count)}{unit}"
        return f"{self.seconds:g}s"

    def __repr__(self) -> str:
        return f"Duration({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duration) and other.seconds == self.seconds

    def __hash__(self) -> int:
        return hash(self.seconds)


class WritePolicy(enum.Enum):
    """When a block that the tier above holds is written to this tier."""

    THROUGH = "through"
    ON_EVICT = "on_evict"
    NEVER = "never"


class Admission(enum.Enum):
    """Which of the blocks offered are taken."""

    ALWAYS = "always"
    SECOND_TOUCH = "second_touch"


class Persistence(enum.Enum):
    """Whether blocks outlive the process."""

    KEEP = "keep"
    DISCARD = "discard"


class Durability(enum.Enum):
    """What a committed block survives: the death of processes, or a loss of power too."""

    PROCESS = "process"
    POWER = "power"


class TierSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """What every tier can be told. Backends derive from it with a tag: their `kind`."""

    capacity: Capacity
    eviction: str = "adaptive"
    write: WritePolicy = WritePolicy.THROUGH
    admission: Admission = Admission.ALWAYS
    queue_blocks: int = 4096
    load_deadline: Duration = Duration(10.0)
    store_deadline: Duration = Duration(60.0)

    @property
    def kind(self) -> str:
        """The backend's name, as it stands in the file."""
        return str(self.__struct_config__.tag)


_VALUES: tuple[type[ByteSize] | type[Capacity] | type[Duration], ...] = (
    ByteSize,
    Capacity,
    Duration,
)


def dec_hook(kind: type[object], value: object) -> object:
    """Tell msgspec how to read the value types of this file."""
    for value_type in _VALUES:
        if kind is value_type:
            return value_type.parse(value)
    raise TypeError(f"no decoder for {kind.__name__}")


def enc_hook(value: object) -> object:
    """Tell msgspec how to write them: as a person would."""
    if isinstance(value, _VALUES):
        return str(value)
    raise TypeError(f"no encoder for {type(value).__name__}")
