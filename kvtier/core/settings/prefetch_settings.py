"""What is brought into CPU memory before anybody asks for it, and how much of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""A part of a whole: 0 is nothing, 1 is all of it."""


class PrefetchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is brought into CPU memory ahead of time. Only an engine that serves does so."""

    waiting: bool = True
    """Whether blocks of lower tiers are brought into CPU memory while their request waits in the
    engine's queue."""
    memory: Share = 0.25
    """The most of CPU memory that such blocks may take until they are used. It shrinks while they
    are not."""
    link: Share = 0.5
    """The most of a lower tier's threads that bring such blocks at a time. Loads of requests that
    are served go first in any case."""
    restart: Share = 0.75
    """How much of CPU memory an engine that starts fills with the hottest blocks of its lower
    tiers, before anybody asks for them; 0 turns this off."""
