"""Numbers as people read them: sizes, rates, times, shares."""

from __future__ import annotations

from kvtier.amounts import duration, scaled, size

__all__ = ["bar", "count", "duration", "rate", "share", "size"]

_RATES = ("KB/s", "MB/s", "GB/s")
_COUNTS = ("", "k", "M", "G", "T")


def rate(bytes_per_second: float) -> str:
    """Bytes a second, in the decimal units in which links and disks are sold."""
    return " ".join(scaled(bytes_per_second / 1000, 1000, _RATES))


def count(number: float) -> str:
    """A number of things, like "1.5M"."""
    return "".join(scaled(number, 1000, _COUNTS))


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
