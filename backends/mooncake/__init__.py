"""The mooncake tier: the memory of other machines, by Mooncake Store.

A block is a value, and namespace and key are its name. Mooncake places values, replicates and
evicts them; the tier has no budget of its own there. It remembers what the pool was known to hold,
and has it asked when a request comes (`kvtier.chain.queries`). Every hit may fail, and is then a
miss.

- `backend`: settings, checks, and how to open tier, handler and inspector
- `tier`: what the pool is known to hold, answered from memory
- `handler`: moves records between host memory and the pool, with deadlines of its own
- `inspect`: what commands can know of a pool
- `master`: what its master says of it over HTTP
- `client`: one Mooncake client: how it is found, opened and understood
"""

from __future__ import annotations

from kvtier.backends.mooncake.backend import BACKEND, MooncakeBackend
from kvtier.backends.mooncake.client import MooncakeSettings
from kvtier.backends.mooncake.handler import MooncakeHandler
from kvtier.backends.mooncake.tier import MooncakeSpec, MooncakeTier

__all__ = [
    "BACKEND",
    "MooncakeBackend",
    "MooncakeHandler",
    "MooncakeSettings",
    "MooncakeSpec",
    "MooncakeTier",
]
