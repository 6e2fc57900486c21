"""The tiers that kvtier brings, as the shipped suites see them."""

from __future__ import annotations

from pathlib import Path

from kvtier.backends.memory import BACKEND as MEMORY_BACKEND
from kvtier.backends.memory import MemorySettings
from kvtier.core.settings import ByteSize, Capacity
from kvtier.testing.subject import Subject


def capacity(size: int) -> Capacity:
    """So many bytes."""
    return Capacity(size=ByteSize(size))


class MemorySubject(Subject):
    """The reference model must keep its own contract."""

    backend = MEMORY_BACKEND

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> MemorySettings:
        return MemorySettings(capacity=capacity(blocks * record_bytes))


MEMORY = MemorySubject()
