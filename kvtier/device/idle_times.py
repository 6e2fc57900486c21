"""When an engine is at rest, as far as one of its workers is told."""

from __future__ import annotations

import time
from collections.abc import Callable

_REST_S = 0.05
"""Between two steps of a busy engine there is less."""
_WEIGHT = 0.2


class Steps:
    """Begin and end in the worker's own thread; others ask. No lock, because each of these is one
    number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._ended = 0.0
        self._running = False
        self.any = False
        """Whether there has been one at all."""
        self.seconds = 0.0
        """From the beginning of one to that of the next, while they follow each other."""
        self.listener: Callable[[int, float], None] | None = None
        """Told of each step that another has followed: how many requests it only decoded, 0 if it
        did anything else, and its seconds."""
        self._decoding = 0

    def begin_anew(self) -> None:
        """Those so far were an engine's trials, before it serves."""
        self.any = self._running = False
        self.seconds = 0.0

    def began(self, decoding: int = 0) -> None:
        """The engine goes to work: it decodes so many requests and does nothing else, or 0."""
        now = self._clock()
        if self.any and now - self._ended < _REST_S:
            taken = now - self._began
            self.seconds += _WEIGHT * (taken - self.seconds) if self.seconds else taken
            if self.listener is not None:
                self.listener(self._decoding, taken)
        self._decoding = decoding
        self._began, self._running, self.any = now, True, True

    def ended(self) -> None:
        """It has what it wanted, or it has only begun to wait for it."""
        self._ended, self._running = self._clock(), False

    @property
    def resting(self) -> bool:
        """Whether no step has come for a while."""
        return not self.any or (not self._running and self._clock() - self._ended >= _REST_S)


SHARE = 0.02
"""So much of a step may be lost to what goes on beside it."""
_REST_SLICE_S = 0.002
"""A step that begins while the engine rests may come in the middle of a slice."""
_PATIENCE_S = 60.0
"""An engine that never rests would keep slow copies for ever. After so long a slice may take more
of one step than `SHARE`, but not of all steps together."""


class Gaps:
    """Where there is room for slices of work that hold up a step: while the engine rests, or so
    short that no step is noticeably longer for it."""

    def __init__(self, steps: Steps, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._last = self._fitted = clock()
        self._pause = 0.0

    def room(self, least: float) -> float:
        """How many seconds a slice may take now, of which none takes less than so many; 0 if it has
        to wait."""
        now, room = self._clock(), SHARE * self._steps.seconds
        if self._steps.resting:
            self._fitted = now
            return max(_REST_SLICE_S, least)
        if now - self._last < self._pause:
            return 0.0
        if least <= room:
            self._fitted = now
            return room
        return least if now - self._fitted >= _PATIENCE_S else 0.0

    def took(self, seconds: float) -> None:
        """What a slice has taken."""
        self._last, self._pause = self._clock(), seconds / SHARE
