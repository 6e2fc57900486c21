"""Two threads at one tier: its own, which asks, and its keeper's, which helps while nobody asks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvtier.core.slab.tier import SlabTier


class AskedTier(SlabTier):
    """A tier that its keeper may take news in for."""

    mutex: threading.RLock
    _asked: bool


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="AskedTier")


def alone(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Keep the keeper from taking news in meanwhile, and from going on with it before."""

    def call(tier: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        tier._asked = True
        with tier.mutex:
            return method(tier, *args, **kwargs)

    return functools.update_wrapper(call, method)
