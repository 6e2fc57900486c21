"""What an object tier's keeper must know of the settings."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from kvtier.backends.object.budget.claims import LEASE_S
from kvtier.types import BlockKey

ProtectedBlocks = Mapping[str, Set[BlockKey]]
"""Blocks of other namespaces that are not deleted to make room for this one."""


class Limits(msgspec.Struct, frozen=True):
    """Sizes in bytes and times in seconds."""

    capacity: int
    refresh_s: float
    audit_s: float
    age_max_s: float | None = None
    reader_grace_s: float = 20.0
    lease_s: float = LEASE_S
    protected: ProtectedBlocks = {}
