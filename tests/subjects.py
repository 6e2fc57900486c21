"""The tiers that kvtier brings, as the shipped suites see them."""

from __future__ import annotations

from pathlib import Path

from kvtier.backends.memory import MemoryBackend, MemorySettings
from kvtier.core.disk import Disk
from kvtier.core.settings import ByteSize, Capacity
from kvtier.testing.subject import Subject


class MemorySubject(Subject):
    """The reference model must keep its own contract."""

    def __init__(self) -> None:
        self._backend = MemoryBackend()

    def backend(self, disk: Disk) -> MemoryBackend:
        return self._backend

    def settings(self, folder: Path, capacity: int) -> MemorySettings:
        return MemorySettings(capacity=Capacity(size=ByteSize(capacity)))


MEMORY = MemorySubject()
