"""What an object tier's keeper must know of the settings."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from kvtier.backends.object.budget.claims import LEASE_S
from kvtier.types import BlockKey

Spared = Mapping[str, Set[BlockKey]]
"""Blocks of other namespaces that make no room for this one's."""


class Limits(msgspec.Struct, frozen=True):
    """Bytes and seconds, and what is not to go."""

    capacity: int
    refresh_s: float
    audit_s: float
    age_max_s: float | None = None
    read_s: float = 20.0
    lease_s: float = LEASE_S
    spared: Spared = {}
