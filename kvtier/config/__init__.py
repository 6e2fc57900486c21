"""The configuration: a stack file, or nested dicts, becomes a `StackConfig`.

Every mistake in it is told at once, each with its line, its place and a remedy. The settings that a
tier can have are in `kvtier.core.settings` and with its backend.

- `stack_config`: the types that a stack is decoded into.
- `loader`: `load` and its like, the way in; `tiers` reads and checks the list of tiers.
- `decode`: plain values into structs, and the words for what is wrong with them.
- `document`: plain values with their places, and the problems found in them.
- `yaml_positions`: YAML text as nodes that know their lines; `environment`: `${NAME}` in texts.
- `fields`, `json_schema`, `reference`: what a file may say, for editors and for people.
"""

from kvtier.config.loader import Source, check, effective, folders, load
from kvtier.config.stack_config import (
    TIERS_MAX,
    VERSION,
    Loads,
    MoverMode,
    MoverSettings,
    Name,
    Sleep,
    StackConfig,
    check_engine,
)

__all__ = [
    "TIERS_MAX",
    "VERSION",
    "Loads",
    "MoverMode",
    "MoverSettings",
    "Name",
    "Sleep",
    "Source",
    "StackConfig",
    "check",
    "check_engine",
    "effective",
    "folders",
    "load",
]
