"""Memory that reading large tables takes, and the C library would keep."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_memory() -> None:
    """Return to the system what reading large tables has left free: the process would keep it, a
    third of all that it has."""
    with contextlib.suppress(AttributeError):  # a C library without it keeps what it has
        ctypes.CDLL(None).malloc_trim(0)
