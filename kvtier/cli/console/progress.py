"""How far a command has come, on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """How far something has come: shown on a terminal only, a few times a second."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._start = self._next = time.monotonic()
        self.done = self.bytes = 0

    def advance(self, count: int, size: int = 0) -> None:
        """So much more is done."""
        self.done += count
        self.bytes += size
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._next = now + 0.2
            line = self.line(now - self._start)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """How much of what is done, how fast, and the time left."""
        from kvtier.observe import human

        text = f"{self._what} {self.done}"
        if self._total:
            text += f" of {self._total} {self._unit} {human.share(self.done, self._total)}"
        if self.bytes and seconds > 0:
            text += f", {human.rate(self.bytes / seconds)}"
        if 0 < self.done < self._total:
            left = seconds * (self._total - self.done) / self.done
            text += f", {human.duration(left)} left"
        return text

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Progress]:
    """A line that says how far something has come, gone at the end. It is there at once: a store
    that does not answer, or the first of a few long simulations, is waited for before any end."""
    bar = Progress(what, total, unit)
    try:
        bar.advance(0)
        yield bar
    finally:
        bar.clear()
