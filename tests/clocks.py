"""A clock that tests hold."""

from __future__ import annotations


class Clock:
    """Stands still until `now` is changed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
