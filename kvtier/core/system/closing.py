"""The end of what was opened together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol


class Closable(Protocol):
    """Whatever holds something that others may be waiting for."""

    def close(self) -> None: ...


def close_all(parts: Iterable[Closable]) -> None:
    """Close them, in their order. One that raises, as somebody else's tier may, keeps none of the
    others open; what it raised is raised again in the end."""
    with contextlib.ExitStack() as ending:
        for part in reversed(list(parts)):
            ending.callback(part.close)
