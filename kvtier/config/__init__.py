"""The configuration: a stack file, or nested dicts, becomes a `StackConfig`.

All mistakes are reported in one go, each with its line, its place and a remedy. What a single tier
can be told is in `kvtier.settings` and in its backend.

- `stack_config`: the types that a stack file is decoded into.
- `loader`: `load`, the way in; it checks the tiers against this machine and against each other.
- `decode`: plain values into structs, and the wording of what is wrong with them.
- `document`: YAML as plain values with their places, and the problems found in them.
- `schema`: what a stack file may say, for editors and for people.
"""

from kvtier.config.loader import Source, check, effective, folders, load
from kvtier.config.stack_config import (
    TIERS_MAX,
    VERSION,
    LoadPolicy,
    MoverMode,
    MoverSettings,
    Name,
    RateSettings,
    Sleep,
    StackConfig,
    check_engine,
)

__all__ = [
    "TIERS_MAX",
    "VERSION",
    "LoadPolicy",
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
