"""What the shipped suites must know of the folder tier."""

from __future__ import annotations

from pathlib import Path

from kvtier_folder import BACKEND, FolderSettings, FolderTier
from kvtier_folder.handler import FolderHandler

from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity, TierSettings
from kvtier.system.disk import Disk
from kvtier.testing.subject import Subject


class FolderSubject(Subject):
    """Its blocks outlive the process, and its folder holds a little more than blocks."""

    backend = BACKEND
    persistent = True
    overhead_bytes = 4096  # namespace.json and the lock

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> FolderSettings:
        size = Capacity(size=ByteSize(blocks * record_bytes))
        return FolderSettings(path=str(folder / "blocks"), capacity=size)

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> FolderTier:
        assert isinstance(settings, FolderSettings)
        return BACKEND.open_tier(settings, context, disk)

    def open_handler(
        self, settings: TierSettings, context: TierContext, disk: Disk
    ) -> FolderHandler:
        assert isinstance(settings, FolderSettings)
        return BACKEND.open_handler(settings, context, disk)

    def block_files(self, folder: Path) -> list[Path]:
        return list(folder.rglob("*.kv"))


SUBJECT = FolderSubject()
