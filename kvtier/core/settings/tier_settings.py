"""The settings that every tier has."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from kvtier.core.settings.values import Capacity, Duration
from kvtier.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
"""No medium gains from more, and a machine has only so many."""


class WritePolicy(enum.Enum):
    """When a block that the tier above holds is written to this tier."""

    THROUGH = "through"
    """As soon as the tier above has it, or could not take it; what a kill has prevented follows
    after the restart."""
    ON_EVICT = "on_evict"
    """When the tier above is about to let it go."""
    NEVER = "never"
    """Engines only read this tier; commands may fill it."""


class Admission(enum.Enum):
    """Which of the blocks offered are taken."""

    ALWAYS = "always"
    """Every one."""
    SECOND_TOUCH = "second_touch"
    """Those that are used a second time: it spares the medium what is never asked for again."""


class Persistence(enum.Enum):
    """Whether blocks outlive the process."""

    KEEP = "keep"
    """Yes: the next start serves them."""
    DISCARD = "discard"
    """No: what a process leaves behind is removed."""


class Durability(enum.Enum):
    """What a committed block survives."""

    PROCESS = "process"
    """The death of processes; after a loss of power the block may be a miss."""
    POWER = "power"
    """A loss of power too; every commit waits for the device."""


class Gds(enum.Enum):
    """Whether blocks are read from a local disk straight into GPU memory."""

    AUTO = "auto"
    """Yes, if a real attempt works; otherwise log why not, and go through pinned memory."""
    REQUIRE = "require"
    """Yes, or the engine does not start."""
    OFF = "off"
    """No: always through pinned memory."""


class TierSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """What every tier can be told. Backends derive from it with a tag: their `kind`.

    A text under a field is its description in the reference and in editors.
    """

    capacity: Capacity
    """How many bytes this tier may take in all, at any moment."""
    eviction: str = "adaptive"
    """The eviction policy, by name: it decides which blocks go when the tier is full."""
    write: WritePolicy = WritePolicy.THROUGH
    """When a block that the tier above holds is written to this one."""
    admission: Admission = Admission.ALWAYS
    """Which of the blocks offered are taken."""
    queue_blocks: Count = 4096
    """How many blocks may wait to be moved in or out. Beyond it, stores are dropped and blocks are
    not hits."""
    load_deadline: Duration = Duration(10.0)
    """A load that takes longer is given up, and its blocks are recomputed."""
    store_deadline: Duration = Duration(60.0)
    """A store that takes longer is given up, and its blocks are forgotten."""

    @property
    def kind(self) -> str:
        """The backend's name, as it stands in the file."""
        return str(self.__struct_config__.tag)


def check_capacity(capacity: Capacity, size: int, least: int) -> None:
    """Raise ConfigError if a capacity, which is so many bytes here, is less than a block takes."""
    if size < least:
        # So few bytes are mostly GiB in fact.
        hint = "; a number without a unit is bytes" if size < 4096 else ""
        problem = f"{capacity} holds not one block"
        raise ConfigError(".capacity", problem, f"write at least {least} bytes{hint}")
