"""The memory tier: a plain model of what every tier does, and a real tier in one process.

- `settings`, `backend`: what a stack file says, and how both halves are opened.
- `tier`: the catalogue.
- `handler`: the data side.
- `store`: the memory that both share, and the spec: where blocks are in it.
"""

from kvtier.backends.memory.backend import BACKEND, MemoryBackend
from kvtier.backends.memory.handler import MemoryHandler
from kvtier.backends.memory.settings import MemorySettings
from kvtier.backends.memory.store import MemorySpec, MemoryStore
from kvtier.backends.memory.tier import MemoryTier

__all__ = [
    "BACKEND",
    "MemoryBackend",
    "MemoryHandler",
    "MemorySettings",
    "MemorySpec",
    "MemoryStore",
    "MemoryTier",
]
