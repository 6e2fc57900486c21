"""What an engine has learned of its links and of its own speed, as the next engine reads it.

What is read may be anybody's work: every number has a range, and what is out of it is not taken.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec

VERSION: Literal[1] = 1
BYTES_MAX = 64 << 10
"""A larger file is none of ours."""
LINKS_MAX = 32
SECONDS_MAX = 3600.0

Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
LinkName = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{1,80}$(?!\n)")]


class Owner(msgspec.Struct, frozen=True):
    """Whose rates these are: they hold for this machine, device, model and stack."""

    machine: Text
    device: Text
    model: Text
    stack: Text


class KeptLink(msgspec.Struct, frozen=True):
    """What a load over a link takes."""

    latency: Seconds
    seconds_per_gib: Seconds


class KeptPrefill(msgspec.Struct, frozen=True):
    """What computing a prompt takes."""

    seconds_per_ktoken: Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)]
    """At the head of a prompt."""
    more_per_ktoken: Seconds
    """How much longer that takes behind so many tokens more."""
    longest: Tokens
    """The longest step that this rests on."""


class Rates(msgspec.Struct, frozen=True):
    """What one cost model tells the next."""

    links: Annotated[dict[LinkName, KeptLink], msgspec.Meta(max_length=LINKS_MAX)] = {}
    prefill: KeptPrefill | None = None


class KeptRates(msgspec.Struct, frozen=True):
    """A file."""

    version: Literal[1]
    owner: Owner
    saved: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    """When it was written, in seconds of the epoch."""
    rates: Rates


def encode(owner: Owner, rates: Rates) -> bytes:
    """What is to be written, now."""
    kept = KeptRates(VERSION, owner, time.time(), rates)
    return msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n"


def decode(text: bytes) -> KeptRates:
    """Read what `encode` wrote; raises ValueError on anything else."""
    if len(text) > BYTES_MAX:
        raise ValueError(f"more than {BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(text, type=KeptRates)
    except (RecursionError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ValueError(f"not what kvtier writes: {error}") from None
