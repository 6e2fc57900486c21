"""The settings of an NVMe tier, and what follows from them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvtier.settings import (
    ByteSize,
    Durability,
    Duration,
    Persistence,
    Threads,
    TierSettings,
    WriteRate,
)

DriveWrites = Annotated[float, msgspec.Meta(gt=0, le=1000)]
_DAY_S = 86400.0


class NvmeSettings(TierSettings, frozen=True, kw_only=True, tag="nvme"):
    """Blocks on a local disk, in a folder that several engines and the command line may share."""

    path: str
    """The folder; it is made if its parent exists. Everything in it counts against `capacity`."""
    free_floor: ByteSize = ByteSize(1 << 30)
    """How much must stay free on the file system, whatever `capacity` says."""
    persistence: Persistence = Persistence.KEEP
    """Whether blocks outlive the process."""
    keep_for: Duration = Duration(3 * 86400.0)
    """For how long after its last use a model that is not served keeps its share of the folder."""
    durability: Durability = Durability.PROCESS
    """Whether a committed block survives only the death of processes, or a loss of power too."""
    writes: WriteRate | None = None
    """How much may be written in the long run, by all engines that share the folder, with bursts of
    an hour's worth. Within it the blocks are written that will earn the most hits. Without this and
    `endurance`: as much as comes."""
    endurance: DriveWrites | None = None
    """The same as a number of times that `capacity` may be written a day, like 1.0."""
    threads: Threads = 8
    """How many reads and writes are under way at once."""
    direct: bool = True
    """Bypass the page cache where the file system allows it."""

    def __post_init__(self) -> None:
        if self.writes is not None and self.endurance is not None:
            raise ValueError("has writes and endurance; write one of them: both are the budget")

    def writes_per_second(self, capacity: int) -> float | None:
        """How many bytes may be written in the long run, where `capacity` is so many; None: as many
        as come."""
        if self.endurance is not None:
            return self.endurance * capacity / _DAY_S
        return None if self.writes is None else self.writes.per_second
