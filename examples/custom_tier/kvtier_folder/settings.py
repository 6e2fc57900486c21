"""What a stack's YAML file can say about a tier of this kind."""

from __future__ import annotations

from kvtier.settings import TierSettings


class FolderSettings(TierSettings, frozen=True, kw_only=True, tag="folder"):
    """One file a block, in a folder of its own; for one process at a time."""

    path: str
    """The folder; it is made if its parent exists. Everything in it belongs to this tier."""
    eviction: str = "lru"
    """What must go when the tier is full: it knows only the least recently used."""
