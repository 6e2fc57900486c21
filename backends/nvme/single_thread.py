"""Two threads use one tier: its own, and its keeper's, which applies updates while it is idle."""

from __future__ import annotations

import functools
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvtier.core.slab.tier import SlabTier
from kvtier.eviction import EvictionPolicy

_IDLE_S = 5.0
"""A tier that was not called for so long may not be called again soon: its keeper applies updates
itself, because neighbours wait for slabs that an idle engine holds."""


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="SerializedTier")


def serialized(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method without the keeper applying updates meanwhile; make it stop if it does now."""

    def call(tier: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        tier._asked = True
        with tier.mutex:
            return method(tier, *args, **kwargs)

    return functools.update_wrapper(call, method)


class SerializedTier(SlabTier):
    """A tier whose updates its keeper may apply while the tier's own thread is idle."""

    def __init__(
        self,
        medium: str,
        slot_bytes: int,
        policy: EvictionPolicy,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(medium, slot_bytes, policy, clock)
        self.mutex = threading.RLock()
        self._asked = True
        self._idle_since = 0.0
        self._taking = False
        """Whether the keeper applies updates: a caller waits meanwhile, and a recent call keeps it
        from beginning, so that what a lookup has found is there a moment later."""

    # What is overridden below runs around these. Not `lookup`, which only reads, and is asked most.
    prepare_load = serialized(SlabTier.prepare_load)
    complete_load = serialized(SlabTier.complete_load)
    prepare_store = serialized(SlabTier.prepare_store)
    touch = serialized(SlabTier.touch)
    carry_uses = serialized(SlabTier.carry_uses)
    victims = serialized(SlabTier.victims)
    victims_within = serialized(SlabTier.victims_within)
    take_events = serialized(SlabTier.take_events)
    take_recovered = serialized(SlabTier.take_recovered)
    forget_recovered = serialized(SlabTier.forget_recovered)
    take_hottest = serialized(SlabTier.take_hottest)
    forget_hottest = serialized(SlabTier.forget_hottest)

    def take_in_if_idle(self) -> None:
        """For the keeper's thread: what this tier's own thread is not there to do."""
        now = time.monotonic()
        if self._asked:
            self._asked, self._idle_since = False, now
        elif now - self._idle_since >= _IDLE_S and self.mutex.acquire(blocking=False):
            try:
                self._taking = True
                while self._updates_wait() and not self._asked:
                    self._take_some_in()
                self._events.fold()
            finally:
                self._taking = False
                self.mutex.release()

    @abstractmethod
    def _updates_wait(self) -> bool:
        """Whether the keeper has queued updates."""

    @abstractmethod
    def _take_some_in(self) -> None:
        """Apply some of them."""
