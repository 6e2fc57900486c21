"""What `du` and `doctor` say of the writes to an NVMe tier with a budget."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvtier import amounts
from kvtier.backends.nvme.settings import NvmeSettings
from kvtier.backends.nvme.wear.drive_counters import Drive, read_drives
from kvtier.backends.nvme.wear.write_ledger import NAME, WriteLedger, read_entry
from kvtier.core.wear.token_bucket import BURST_S
from kvtier.inspect.contents import DriveWear, Finding, Level, Writes, standing
from kvtier.system.disk import Disk

_DAY_S = 86400.0


def writes_to(settings: NvmeSettings, capacity: int) -> Writes | None:
    """What is known; None of a tier without a budget, and of which none was kept."""
    root = Path(settings.path)
    rate = settings.writes_per_second(capacity)
    entry = read_entry(root / NAME)
    if rate is None and entry is None:
        return None
    drives = [_wear(drive) for drive in read_drives(standing(root))]
    found = Writes(per_day=None if rate is None else rate * _DAY_S, drives=drives)
    if entry is not None:
        found.written, found.since = entry.written, entry.since
        if rate is not None:
            now = WriteLedger(root, rate, BURST_S * rate).look()
            found.left = 0.0 if now is None else max(0.0, now.level)
    return found


def _wear(drive: Drive) -> DriveWear:
    return DriveWear(
        device=drive.device,
        written=drive.written,
        percent_used=drive.percent_used,
        problem=drive.problem,
    )


def check_writes(area: str, settings: NvmeSettings) -> Iterator[Finding]:
    """Findings for `doctor`; none where no budget is set."""
    folder = standing(Path(settings.path))
    total = Disk().total_bytes(folder)
    found = writes_to(settings, settings.capacity.resolve(total))
    if found is None or found.per_day is None:
        return
    what = f"{amounts.size(found.per_day)} a day may be written"
    if found.written is not None and found.since is not None:
        what += f", {amounts.size(found.written)} were since {day(found.since)}"
    if found.per_day > total:
        times = found.per_day / max(1, total)
        yield Finding(
            area,
            Level.NOTE,
            f"{what}: {times:.1f} times the file system a day",
            "a usual data-centre drive endures 1 a day for five years, as endurance: 1.0",
        )
    else:
        yield Finding(area, Level.OK, what)
    for drive in found.drives:
        if drive.written is None:
            name = f"{drive.device}: " if drive.device else ""
            yield Finding(
                area, Level.NOTE, f"{name}what the drive says was written is not known here",
                drive.problem,
            )  # fmt: skip
        else:
            used = f"{drive.percent_used} % of its endurance used"
            level = Level.WARN if (drive.percent_used or 0) >= 100 else Level.OK
            said = f"{drive.device} says: {amounts.size(drive.written)} written, {used}"
            yield Finding(area, level, said, "it has outlived what its maker promised: replace it")


def day(at: float) -> str:
    """A day, for people; what no calendar has is unknown."""
    try:
        return datetime.fromtimestamp(at, UTC).date().isoformat()
    except (OverflowError, OSError, ValueError):
        return "an unknown day"
