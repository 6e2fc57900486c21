"""Numbers as people read them: sizes, rates, times, shares."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = ("KB/s", "MB/s", "GB/s")
_COUNTS = ("", "k", "M", "G", "T")
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def size(number: float) -> str:
    """A number of bytes, like "1.5 GiB"."""
    return " ".join(_scaled(number, 1024, _SIZES))


def duration(seconds: float) -> str:
    """A length of time in the largest unit of which it holds one."""
    for unit, name in _TIMES:
        if seconds >= 0.9995 * unit:
            return f"{_digits(seconds / unit)} {name}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"


def age(seconds: float) -> str:
    """How old something is in whole units, like "5m", as kubectl says it."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{int(seconds // unit)}{name}"
    return f"{max(0, int(seconds))}s"


def rate(bytes_per_second: float) -> str:
    """Bytes a second, in the decimal units in which links and disks are sold."""
    return " ".join(_scaled(bytes_per_second / 1000, 1000, _RATES))


def count(number: float) -> str:
    """A number of things, like "1.5M"."""
    return "".join(_scaled(number, 1000, _COUNTS))


def share(part: float, whole: float) -> str:
    """A part of a whole in percent."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def bar(part: float, whole: float, width: int) -> str:
    """A bar of at most `width` characters, for terminals."""
    filled = min(1.0, max(0.0, part / whole)) * width if whole else 0.0
    eighths = " ▏▎▍▌▋▊▉"
    full = int(filled)
    rest = eighths[int((filled - full) * 8)] if full < width else ""
    return ("█" * full + rest.strip()).ljust(width, "·")


def _scaled(number: float, step: int, units: Sequence[str]) -> tuple[str, str]:
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
