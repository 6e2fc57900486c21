"""When an engine leaves room for what goes on beside it: its steps, gaps between them for pinning,
and the pace of stores, so that they do not hold up an engine that only decodes.

Steps in which each request gets one token are alike: their times with a store beside them and
without one are compared while the engine serves. What stores cost a prompt is not measured, because
no two steps with prompts are alike. So nothing slows stores while the engine computes prompts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

logger = logging.getLogger(__name__)

_REST_S = 0.05
"""Between two steps of a busy engine there is less."""
_WEIGHT = 0.2


class EngineSteps:
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
_FORCED_AFTER_S = 60.0
"""An engine that never rests would keep slow copies for ever. After so long a slice may take more
of one step than `SHARE`, but not of all steps together."""


class Gaps:
    """Where there is room for slices of work that hold up a step: while the engine rests, or so
    short that no step is noticeably longer for it."""

    def __init__(self, steps: EngineSteps, clock: Callable[[], float] = time.monotonic) -> None:
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
        return least if now - self._fitted >= _FORCED_AFTER_S else 0.0

    def took(self, seconds: float) -> None:
        """What a slice has taken."""
        self._last, self._pause = self._clock(), seconds / SHARE


LOST_MAX, LOST_LITTLE = 0.01, 0.005
"""Above the first, stores get less of the time. Below the second they get more."""
_SHARE_MIN = 1 / 64
_WINDOW = 16
"""Steps of each kind that are compared."""
_FRESH_S = 10.0
"""EngineSteps become longer as their requests do. So older ones count no more."""
_DECODING_S = 1.0
"""If no step has only decoded for so long, the pace is full."""


class StorePace:
    """One engine's. The engine's own thread tells of its steps, a copier's threads of their stores.

    The engine's thread takes no lock in a step. Only it writes what is compared; a copier's threads
    read single numbers of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._active = 0
        self._touched = False
        """Whether a store ran beside the current step."""
        self._next = 0.0
        """When the next store may begin, if stores do not have all of the time."""
        self._held_until = 0.0
        self._hurried = False
        self._stopped = False
        self._requests = 0
        self._seen = -_DECODING_S
        self._quiet = deque[tuple[float, float]](maxlen=_WINDOW)
        self._beside = deque[float](maxlen=_WINDOW)
        self._recent = deque[bool](maxlen=4 * _WINDOW)
        """Of the last steps, whether a store ran beside them."""
        self._fresh = 0
        """Steps with a store beside them since the last decision."""
        self.share = 1.0

    # -- the engine's side -----------------------------------------------------------------

    def step(self, requests: int, seconds: float) -> None:
        """A step took so long, in which so many requests got one token each; 0 for all others."""
        now, touched = self._clock(), self._touched
        self._touched = self._active > 0
        if not requests:
            return
        if requests != self._requests or now - self._seen > _FRESH_S:
            self._requests, self._fresh = requests, 0
            self._quiet.clear()
            self._beside.clear()
            self._recent.clear()
        self._seen = now
        self._recent.append(touched)
        if not touched:
            self._quiet.append((now, seconds))
            return
        self._beside.append(seconds)
        self._fresh += 1
        if self._fresh >= _WINDOW:
            self._judge(now, seconds)

    def _judge(self, now: float, seconds: float) -> None:
        """There are enough steps with stores: do they take longer than those without?"""
        self._fresh = 0
        quiet = [taken for at, taken in self._quiet if now - at <= _FRESH_S]
        if len(quiet) < _WINDOW // 2:  # stores are always under way: look at a few steps without
            self._held_until = now + _WINDOW * seconds
            return
        longer = median(self._beside) / median(quiet) - 1
        lost = longer * sum(self._recent) / len(self._recent)
        if lost > LOST_MAX:
            self.share = max(_SHARE_MIN, self.share / 2)
        elif lost < LOST_LITTLE:
            self.share = min(1.0, self.share * 1.25)
        logger.debug("stores cost decoding %.1f %%: %.3f of the time", 100 * lost, self.share)

    def hurry(self, awaited: bool) -> None:
        """The engine waits for stores, or no longer: meanwhile none of them waits."""
        with self._changed:
            self._hurried = awaited
            self._changed.notify_all()

    def stop(self) -> None:
        """No store waits any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # -- the copier's side -----------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Meanwhile a store reads the device, and crosses the link."""
        with self._changed:
            while (delay := self.delay()) and not (self._hurried or self._stopped):
                self._changed.wait(delay)
            self._active += 1
            self._touched = True
        began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                now = self._clock()
                self._next = now + (now - began) * (1 / self.share - 1)
                self._changed.notify_all()

    def delay(self) -> float:
        """For how many seconds a store that would begin now has to wait, or to ask again; 0 if it
        may begin."""
        now = self._clock()
        if now < self._held_until:
            return self._held_until - now
        if self.share == 1 or now - self._seen > _DECODING_S:
            return 0.0
        return _DECODING_S if self._active else max(0.0, self._next - now)
