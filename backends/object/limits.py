"""What an object tier's keeper must know of the settings."""

from __future__ import annotations

import msgspec

from kvtier.backends.object.claims import LEASE_S


class Limits(msgspec.Struct, frozen=True):
    """Bytes and seconds."""

    capacity: int
    refresh_s: float
    audit_s: float
    age_max_s: float | None = None
    read_s: float = 20.0
    lease_s: float = LEASE_S
