"""The life that is recorded: `python -m campaign.power.life MEDIUM FOLDER SEED`, preloaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from support.object import object_subjects
from support.tiers import subjects

from kvtier.backends.nvme import NvmeSettings
from kvtier.settings import Durability
from kvtier.testing.crash_processes import Moment, Writer
from kvtier.testing.subject import Subject

NOTES = "notes"


class PowerSafe(subjects.NvmeSubject):
    """A folder whose committed blocks survive a loss of power."""

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> NvmeSettings:
        return _power_safe(super().settings(folder, blocks, record_bytes))


class PowerSafeSlabs(subjects.SlabsSubject):
    """The same in several slabs."""

    def settings(self, folder: Path, blocks: int, record_bytes: int) -> NvmeSettings:
        return _power_safe(super().settings(folder, blocks, record_bytes))


def _power_safe(settings: NvmeSettings) -> NvmeSettings:
    return msgspec.structs.replace(settings, durability=Durability.POWER)


MEDIA: dict[str, Subject] = {
    "nvme, power": PowerSafe(),
    "nvme slabs, power": PowerSafeSlabs(),
    "nvme, process": subjects.NVME,
    "object folder": object_subjects.FOLDER,
}


def main() -> None:
    """Store, load and drop, and report each deed into a file that is recorded like the others."""
    medium, folder, seed = sys.argv[1:]
    pipe = os.open(f"{folder}/{NOTES}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    Writer(MEDIA[medium], Path(folder), pipe, int(seed)).live(Moment("call", -1))


if __name__ == "__main__":
    main()
