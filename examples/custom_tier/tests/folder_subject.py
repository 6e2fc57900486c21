"""What the shipped suites must know of the folder tier."""

from __future__ import annotations

from pathlib import Path

from kvtier_folder import FolderBackend, FolderSettings

from kvtier.core.disk import Disk
from kvtier.core.settings import ByteSize, Capacity
from kvtier.testing.subject import Subject


class FolderSubject(Subject):
    """Its blocks outlive the process, and its folder holds a little more than blocks."""

    persistent = True
    overhead_bytes = 4096  # namespace.json and the lock

    def backend(self, disk: Disk) -> FolderBackend:
        return FolderBackend(disk)

    def settings(self, folder: Path, capacity: int) -> FolderSettings:
        size = Capacity(size=ByteSize(capacity))
        return FolderSettings(path=str(folder / "blocks"), capacity=size)

    def block_files(self, folder: Path) -> list[Path]:
        return list(folder.rglob("*.kv"))


SUBJECT = FolderSubject()
