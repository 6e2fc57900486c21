"""What a stack file says: the types that one is decoded into."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Literal

import msgspec

from kvtier.errors import ConfigError
from kvtier.settings import Count, Duration, Gds, PrefetchSettings, RetainSettings, TierSettings

VERSION = 1
TIERS_MAX = 8

_LETTERS = "letters, digits, dots, dashes and underscores, at most 64 of them"
Name = Annotated[
    str,
    msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)", extra={"form": _LETTERS}),
]


_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Longer than a stack's name, to which an engine's rank may be added."""


class MoverMode(enum.Enum):
    """Where bytes are moved."""

    AUTO = "auto"
    """In a process when an engine serves; on threads in commands and in tests."""
    PROCESS = "process"
    """In a separate process, so that nothing there can hold up or take down the engine."""
    THREADS = "threads"
    """On threads of this process."""


class MoverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How bytes are moved between the tiers."""

    mode: MoverMode = MoverMode.AUTO
    """Where bytes are moved."""


class LoadPolicy(enum.Enum):
    """Which hits are loaded."""

    COST_MODEL = "cost_model"
    """Those that cost less to load than to recompute, by recent speeds."""
    ALWAYS = "always"
    """All of them."""


class RateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine has learned of its speeds: a few KiB, which start the next one."""

    keep: bool = True
    """Keep the speeds of disks, links and computing, so that the first hits after a start are
    decided by them. Only with `load_policy: cost_model`."""
    path: str = "auto"
    """The folder in which they are kept; `auto` is kvtier/rates in $XDG_STATE_HOME, or in
    ~/.local/state."""


class Sleep(enum.Enum):
    """What becomes of stored blocks when an engine sleeps, or pauses and clears its caches."""

    FORGET = "forget"
    """They go, in all tiers: other weights may be read meanwhile in ways that kvtier cannot see."""
    KEEP = "keep"
    """They are found again: for engines whose weights are changed only by vLLM's own calls for
    that, and by others whose names say so."""


class StackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one file says: the tiers of a stack, fastest first, and what they share."""

    version: Literal[1]
    """The version of this format."""
    name: Name = "default"
    """The name of this engine on its machine: each name has CPU memory of its own."""
    chunk_tokens: Count = 256
    """How many tokens one stored block covers: a multiple of the engine's own block size. Models
    with a shorter window, or with states, take fewer."""
    load_policy: LoadPolicy = LoadPolicy.COST_MODEL
    """Which hits an engine loads: those that cost less than recomputing them, or all."""
    rates: RateSettings = RateSettings()
    """What an engine has learned of its speeds."""
    sleep: Sleep = Sleep.FORGET
    """Whether an engine that has slept finds its stored blocks again when it wakes up."""
    drain: Duration = Duration(1.0)
    """How long an engine that is told to end goes on writing what waits for lower tiers. The next
    engine writes the rest, as far as CPU memory is kept until then."""
    gds: Gds = Gds.AUTO
    """Whether blocks go from a local disk straight into GPU memory (GPUDirect Storage)."""
    mover: MoverSettings = MoverSettings()
    """How bytes are moved between the tiers."""
    prefetch: PrefetchSettings = PrefetchSettings()
    """What is brought into CPU memory before anybody asks for it."""
    retain: RetainSettings = RetainSettings()
    """What is kept because a request, a hint or `kvtier pin` asked for it."""
    tiers: tuple[TierSettings, ...]
    """The tiers, in the order in which they are asked; the first must be host memory."""


def check_engine(name: str) -> None:
    """Raise ConfigError if an engine cannot be called this: the files of private media are."""
    if not _ENGINE.fullmatch(name):
        remedy = "write letters, digits, dots, dashes and underscores, a letter or digit first"
        raise ConfigError("engine", f"{name!r} can be no part of a file's name", remedy)
