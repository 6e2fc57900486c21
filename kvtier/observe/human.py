"""Numbers as people read them: sizes, rates, times, shares."""

from __future__ import annotations

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", "k", "M", "G", "T")
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def size(number: float) -> str:
    """A number of bytes, like "1.5 GiB"."""
    step = 0  # what would be shown as 1024 of a unit is 1 of the next
    while abs(number) >= 1023.5 and step < len(_SIZES) - 1:
        number, step = number / 1024, step + 1
    return f"{_digits(number)} {_SIZES[step]}"


def rate(bytes_per_second: float) -> str:
    """Bytes a second, in the decimal units in which links and disks are sold."""
    if bytes_per_second >= 1e9:
        return f"{_digits(bytes_per_second / 1e9)} GB/s"
    return f"{_digits(bytes_per_second / 1e6)} MB/s"


def count(number: float) -> str:
    """A number of things, like "1.5M"."""
    step = 0
    while abs(number) >= 999.5 and step < len(_COUNTS) - 1:
        number, step = number / 1000, step + 1
    return f"{_digits(number)}{_COUNTS[step]}"


def duration(seconds: float) -> str:
    """A length of time in the largest unit of which it holds one."""
    for unit, name in _TIMES:
        if seconds >= unit:
            return f"{_digits(seconds / unit)} {name}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"


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


def _digits(number: float) -> str:
    """Three digits that say something."""
    for limit, form in ((9.995, ".2f"), (99.95, ".1f")):
        if abs(number) < limit:
            text = f"{number:{form}}"
            return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{number:.0f}"
