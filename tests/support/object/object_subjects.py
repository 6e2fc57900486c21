"""The object tier as the shipped suites see it: over a folder, and over a bucket of a server."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from kvtier.backends.object import BACKEND, ObjectHandler, ObjectSettings, ObjectTier
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import REMOVED
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.errors import MediumError
from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity, Duration, TierSettings
from kvtier.slab.layout import keys_of
from kvtier.system.disk import Disk
from kvtier.testing.subject import NAMESPACE, Subject
from kvtier.types import BlockKey
from support.object.object_servers import AZURE_ACCOUNT


class FolderSubject(Subject):
    """A folder as the store."""

    backend = BACKEND
    persistent = True
    shared = True
    revives = True
    sheds = True
    # manifests and descriptions, what is being deleted, and what two engines store before they
    # hear of each other
    overhead_bytes = (64 << 10) + 16 * 12288

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> ObjectSettings:
        return ObjectSettings(
            url=f"file://{folder}/store",
            capacity=Capacity(size=ByteSize(blocks * record_bytes)),
            refresh=Duration(0.2),
            load_deadline=Duration(2.0),
        )

    def open_tier(self, settings: TierSettings, context: TierContext, disk: Disk) -> ObjectTier:
        assert isinstance(settings, ObjectSettings)
        return BACKEND.open_tier(settings, context, self._store(settings, disk))

    def open_handler(
        self, settings: TierSettings, context: TierContext, disk: Disk
    ) -> ObjectHandler:
        assert isinstance(settings, ObjectSettings)
        return BACKEND.open_handler(settings, context, self._store(settings, disk))

    def _store(self, settings: ObjectSettings, disk: Disk) -> FileStore:
        try:
            return FileStore(urlsplit(settings.url).path, disk=disk)
        except StoreError as error:  # as the backend does, which takes a store from here
            raise MediumError(str(error)) from error

    def recorded_removals(self, folder: Path) -> set[BlockKey]:
        """A caretaker records what it evicts, then deletes it, then its own tier hears of it."""
        entries = Journal(FileStore(folder / "store"), NAMESPACE.id).read_all()
        return set(keys_of(entries[entries["kind"] == REMOVED]))

    def block_files(self, folder: Path) -> list[Path]:
        walked = os.walk(folder / "store")  # which does not mind what vanishes meanwhile
        return [Path(at) / name for at, _, names in walked if "/blocks/" in at for name in names]


class BucketSubject(Subject):
    """A prefix of a bucket, a new one for every folder."""

    backend = BACKEND
    persistent = True
    shared = True
    revives = True

    def __init__(self, endpoint: str, bucket: str = "bucket") -> None:
        self.endpoint = endpoint
        self._bucket = bucket

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> ObjectSettings:
        cloud = "az" if self.endpoint.endswith(AZURE_ACCOUNT) else "s3"
        prefix = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        return ObjectSettings(
            url=f"{cloud}://{self._bucket}/{prefix}",
            endpoint=self.endpoint,
            capacity=Capacity(size=ByteSize(blocks * record_bytes)),
            codec="zstd",
            idle_timeout=Duration(20.0),
        )


FOLDER = FolderSubject()
