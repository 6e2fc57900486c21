"""The configuration: a stack file, or nested dicts, becomes a `StackConfig`.

All mistakes are reported in one go, each with its line, its place and a remedy. What a single tier
can be told is in `kvtier.settings` and in its backend.

- `loader`: the types that a stack file is decoded into, and `load`, the way in; it checks the tiers
  against this machine and against each other.
- `document`: YAML as plain values with their places, these as structs, and the wording of what is
  wrong with them.
- `schema`: what a stack file may say, for editors and for people.
"""

from kvtier.config.loader import (
    TIERS_MAX,
    VERSION,
    LoadPolicy,
    Misses,
    MoverMode,
    MoverSettings,
    Name,
    RateSettings,
    Sleep,
    Source,
    StackConfig,
    check,
    check_engine,
    effective,
    folders,
    load,
)

__all__ = [
    "TIERS_MAX",
    "VERSION",
    "LoadPolicy",
    "Misses",
    "MoverMode",
    "MoverSettings",
    "Name",
    "RateSettings",
    "Sleep",
    "Source",
    "StackConfig",
    "check",
    "check_engine",
    "effective",
    "folders",
    "load",
]
