"""The shipped suites, held against the folder tier."""

from __future__ import annotations

from pathlib import Path

from kvtier_folder import FolderBackend, FolderSettings

from kvtier.core.disk import Disk
from kvtier.core.settings import ByteSize, Capacity
from kvtier.testing.contract import TierContract
from kvtier.testing.fault_suite import TierFaults
from kvtier.testing.stateful import tier_machine
from kvtier.testing.subject import Subject


class FolderSubject(Subject):
    """What the suites must know of the folder tier."""

    persistent = True
    overhead_bytes = 4096  # namespace.json and the lock

    def backend(self, disk: Disk) -> FolderBackend:
        return FolderBackend(disk)

    def settings(self, folder: Path, capacity: int) -> FolderSettings:
        return FolderSettings(
            path=str(folder / "blocks"), capacity=Capacity(size=ByteSize(capacity))
        )


class TestFolderContract(TierContract):
    subject = FolderSubject()


class TestFolderFaults(TierFaults):
    subject = FolderSubject()


TestFolderBesideTheModel = tier_machine(FolderSubject()).TestCase
