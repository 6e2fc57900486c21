"""The object tier as the shipped suites see it."""

from __future__ import annotations

from pathlib import Path

from kvtier.backends.object import BACKEND, ObjectSettings
from kvtier.core.settings import ByteSize, Capacity, Duration
from kvtier.testing.subject import Subject


class FolderSubject(Subject):
    """A folder as the store."""

    backend = BACKEND
    persistent = True
    shared = True
    revives = True
    # manifests and the namespaces' descriptions, and what two engines store before they hear of
    # each other
    overhead_bytes = (64 << 10) + 8 * 12288
    quarantine_blocks = 0

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> ObjectSettings:
        return ObjectSettings(
            url=f"file://{folder}/store",
            capacity=Capacity(size=ByteSize(blocks * record_bytes)),
            refresh=Duration(0.2),
        )


FOLDER = FolderSubject()
