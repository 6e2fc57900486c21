"""The settings of tiers: what every tier can be told, and the values that settings are made of.

Backends derive their own settings from `TierSettings` and build them from the types named here. The
files of a stack, which hold such settings, are read in `kvtier.config`.

- `tier_settings`: `TierSettings`, the words of its settings, and limits of numbers.
- `values`: sizes, capacities, durations, rates and secrets, and msgspec's hooks for them.
- `prefetch_settings`: what is brought into CPU memory ahead of time.
- `retain_settings`: what is kept because somebody asked for it.
- `folder_access`: whether a tier may keep its files in a folder.
"""

from kvtier.core.settings.folder_access import standing_folder
from kvtier.core.settings.prefetch_settings import PrefetchSettings, Share
from kvtier.core.settings.retain_settings import RetainSettings
from kvtier.core.settings.tier_settings import (
    Admission,
    Count,
    Durability,
    Gds,
    Persistence,
    Threads,
    TierSettings,
    WritePolicy,
    check_capacity,
)
from kvtier.core.settings.values import (
    ByteSize,
    Capacity,
    Duration,
    Secret,
    WriteRate,
)

__all__ = [
    "Admission",
    "ByteSize",
    "Capacity",
    "Count",
    "Durability",
    "Duration",
    "Gds",
    "Persistence",
    "PrefetchSettings",
    "RetainSettings",
    "Secret",
    "Share",
    "Threads",
    "TierSettings",
    "WritePolicy",
    "WriteRate",
    "check_capacity",
    "standing_folder",
]
