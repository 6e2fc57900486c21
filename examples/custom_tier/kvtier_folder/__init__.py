"""A tier for kvtier that keeps one file a block: `kind: folder` in a stack's YAML file."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.inspect import InspectorContext
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.settings import check_capacity
from kvtier.system.disk import Disk
from kvtier_folder.handler import FolderHandler
from kvtier_folder.inspector import FolderInspector
from kvtier_folder.medium import FolderSpec
from kvtier_folder.settings import FolderSettings
from kvtier_folder.tier import FolderTier

__all__ = ["BACKEND", "FolderBackend", "FolderSettings", "FolderSpec", "FolderTier"]


class FolderBackend(Backend[FolderSettings]):
    """The door: everything that kvtier knows of this package goes through here."""

    kind = "folder"
    settings = FolderSettings
    spec = FolderSpec

    def check(self, settings: FolderSettings, record_bytes: int | None) -> None:
        if settings.eviction != "lru":
            raise ConfigError(".eviction", f"no {settings.eviction!r} here", 'write "lru"')
        parent = Path(settings.path).parent
        if not os.access(parent, os.W_OK):
            raise ConfigError(".path", f"{parent} cannot be written", "create it, or name another")
        check_capacity(settings.capacity, self._capacity(settings), record_bytes or 1)

    def open_tier(
        self, settings: FolderSettings, context: TierContext, disk: Disk | None = None
    ) -> FolderTier:
        folder, size = Path(settings.path), self._capacity(settings)
        return FolderTier(folder, size, context.namespace, disk or Disk())

    def open_handler(
        self, settings: FolderSettings, context: TierContext, disk: Disk | None = None
    ) -> FolderHandler:
        return FolderHandler(Path(settings.path), context.namespace, disk or Disk())

    def open_inspector(
        self, settings: FolderSettings, context: InspectorContext
    ) -> FolderInspector:
        return FolderInspector(self, settings, context)

    def identity(self, settings: FolderSettings) -> str | None:
        return str(Path(settings.path).resolve())

    def _capacity(self, settings: FolderSettings) -> int:
        return settings.capacity.resolve(Disk().total_bytes(Path(settings.path).parent))


BACKEND = FolderBackend()
