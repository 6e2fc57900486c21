"""Sizes and times as messages show them."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def size(number: float) -> str:
    """A number of bytes, like "1.5 GiB"."""
    return " ".join(scaled(number, 1024, _SIZES))


def duration(seconds: float) -> str:
    """A length of time in the largest unit of which it holds one."""
    for unit, name in _TIMES:
        if seconds >= 0.9995 * unit:
            return f"{_digits(seconds / unit)} {name}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"


def scaled(number: float, step: int, units: Sequence[str]) -> tuple[str, str]:
    """A number in the largest unit of which it holds one."""
    at = 0  # what would be shown as 1024 of a unit is 1 of the next
    while abs(number) >= step - 0.5 and at < len(units) - 1:
        number, at = number / step, at + 1
    return _digits(number), units[at]


def _digits(number: float) -> str:
    """Three digits that say something."""
    for limit, form in ((9.995, ".2f"), (99.95, ".1f")):
        if abs(number) < limit:
            return f"{number:{form}}".rstrip("0").rstrip(".")
    return f"{number:.0f}"
