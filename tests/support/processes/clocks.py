"""A clock that tests hold."""

from __future__ import annotations


class Clock:
    """Stands still until `now` is changed, or somebody sleeps by it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
