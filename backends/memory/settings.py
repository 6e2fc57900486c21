"""The settings of a memory tier."""

from __future__ import annotations

from kvtier.core.settings import TierSettings


class MemorySettings(TierSettings, frozen=True, kw_only=True, tag="memory"):
    """Blocks in the memory of one process: the reference that the other tiers are held against."""

    name: str = "memory"
    """Tells apart two tiers of this kind in one stack."""
    eviction: str = "lru"
