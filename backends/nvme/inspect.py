"""An NVMe tier's folder seen from outside: what is there, and its disk: room, rights, wear."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvtier import amounts
from kvtier.backends.nvme.drives import read_drives
from kvtier.backends.nvme.settings import NvmeSettings
from kvtier.backends.nvme.write_budget import NAME, WriteLedger, read_entry
from kvtier.inspect import Finding, Level
from kvtier.inspect.contents import Writes, standing
from kvtier.interfaces.write_budget import BURST_S
from kvtier.settings import WHOSE
from kvtier.slab.files import LOCK, TABLE_SUFFIX, homes, slab_files, used_bytes
from kvtier.slab.folder import kept_free, slab_bytes
from kvtier.slab.folder_inspect import FolderInspector
from kvtier.slab.keeper import only_reads
from kvtier.system.disk import Disk, mounted

_DAY_S = 86400.0


def writes_to(settings: NvmeSettings, capacity: int) -> Writes | None:
    """What is known; None of a tier without a budget, and of which none was kept."""
    root = Path(settings.path)
    rate = settings.writes_per_second(capacity)
    entry = read_entry(root / NAME)
    if rate is None and entry is None:
        return None
    per_day = None if rate is None else rate * _DAY_S
    found = Writes(per_day=per_day, drives=read_drives(standing(root)))
    if entry is not None:
        found.written, found.since = entry.written, entry.since
        if rate is not None:
            now = WriteLedger(root, rate, BURST_S * rate).look()
            found.left = 0.0 if now is None else max(0.0, now.level)
    return found


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


_BLOCK = 4096
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "glusterfs"}


def check_disk(area: str, settings: NvmeSettings) -> Iterator[Finding]:
    """What the disk is, and whether this user can do there what an engine does."""
    root = Path(settings.path)
    yield from _check_medium(area, settings)
    if only_reads(root, settings.write):
        yield Finding(area, Level.OK, f"{settings.path} is only read, and may be")
        return
    if settings.direct:
        yield _check_direct(area, root)
    yield _check_room(area, settings)
    yield from _check_owners(area, root)


def _check_medium(area: str, settings: NvmeSettings) -> Iterator[Finding]:
    root = Path(settings.path)
    folder = standing(root)
    if not root.is_absolute():
        yield Finding(
            area,
            Level.WARN,
            f"{root} is {root.absolute()} here, and another folder for who starts elsewhere",
            f"write path: {root.absolute()}",
        )
    kind, _ = mounted(folder)
    if kind in _NETWORK or kind.startswith("fuse"):
        yield Finding(
            area,
            Level.WARN,
            f"{folder} is {kind}: locks and speed of a network are not those of a disk",
            "use a folder on a local disk, or an object tier with a file:// url",
        )
    elif kind == "tmpfs":
        yield Finding(
            area, Level.WARN, f"{folder} is tmpfs: memory, not a disk", "name a folder on a disk"
        )
    else:
        yield Finding(area, Level.OK, f"{folder} is {kind}")
    if _rotates(folder):
        yield Finding(
            area,
            Level.NOTE,
            "the disk says that it rotates, as virtual disks often do",
            "if it is true, blocks will load slowly: use flash, if there is",
        )


def _check_direct(area: str, root: Path) -> Finding:
    """Write and read a block around the page cache, in a file that has no name by then."""
    folder = standing(root)
    block = mmap.mmap(-1, _BLOCK)
    path = ""
    try:
        fd, path = tempfile.mkstemp(prefix=".kvtier-doctor-", dir=folder)
        os.close(fd)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            Path(path).unlink()
            os.pwritev(fd, [block], 0)
            os.preadv(fd, [block], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return Finding(
                area,
                Level.WARN,
                f"{folder} has no O_DIRECT: everything goes through the page cache too",
                "set direct: false to save the attempt, or use ext4 or xfs",
            )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # what is there is served all the same
            return Finding(area, Level.WARN, f"{folder}: {error.strerror}", "free some room there")
        return Finding(area, Level.BAD, f"{folder}: {error.strerror}", "name one that you may use")
    finally:
        if path:
            Path(path).unlink(missing_ok=True)
    return Finding(area, Level.OK, "O_DIRECT works")


def _check_room(area: str, settings: NvmeSettings) -> Finding:
    disk, folder = Disk(), standing(Path(settings.path))
    size = settings.capacity.resolve(disk.total_bytes(folder))
    used = used_bytes(Path(settings.path)) if Path(settings.path).is_dir() else 0
    kept = kept_free(settings.free_floor.bytes, slab_bytes(size))
    left = used + disk.free_bytes(folder) - kept
    what = f"{amounts.size(size)} allowed, room for {amounts.size(max(0, left))}"
    if left <= 0:
        return Finding(
            area, Level.BAD, f"{what}: nothing can be stored", "free some, or lower free_floor"
        )
    if used > size:
        return Finding(
            area,
            Level.WARN,
            f"{amounts.size(used)} taken, where {amounts.size(size)} are allowed",
            "kvtier gc removes what no engine uses; an engine that runs gives up the rest once it "
            "is started again with this capacity",
        )
    if left < size:
        return Finding(
            area,
            Level.WARN,
            f"{what} above the free floor: the tier will stay smaller",
            "lower capacity to what there is, or free some",
        )
    return Finding(area, Level.OK, what)


def _check_owners(area: str, root: Path) -> Iterator[Finding]:
    """What root has copied here is root's, and ends the engines of another user at their start."""
    found = homes(root) if root.is_dir() else []
    closed = [str(path) for path in found if not os.access(path, os.R_OK | os.W_OK | os.X_OK)]
    if (lock := root / "lock").exists() and not os.access(lock, os.R_OK | os.W_OK):
        closed.insert(0, str(lock))
    tables = [path for home in found for path in slab_files(home, TABLE_SUFFIX)]
    unread = [str(path) for path in tables if not os.access(path, os.R_OK)]
    costs = "that use it do not start", "serve no block of it"
    for paths, cost in zip((closed, unread), costs, strict=True):
        if paths:
            more = f" ({len(paths)} in all)" if len(paths) > 1 else ""
            what = f"{paths[0]} is another user's{more}: engines of this one {cost}"
            yield Finding(area, Level.WARN, what, WHOSE)


def _rotates(folder: Path) -> bool:
    device = folder.stat().st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (base / "queue", base.parent / "queue", base.resolve().parent / "queue"):
        with contextlib.suppress(OSError):
            return (queue / "rotational").read_text().strip() == "1"
    return False


class NvmeInspector(FolderInspector[NvmeSettings]):
    """Looks at a folder on a local disk."""

    own_files = (LOCK, NAME)

    @property
    def root(self) -> Path:
        return Path(self.settings.path)

    def checks(self) -> Iterator[Finding]:
        yield from check_disk(self.area(), self.settings)
        yield from check_writes(self.area(), self.settings)

    def writes(self) -> Writes | None:
        return writes_to(self.settings, self.capacity())

    def moved_to(self, folder: Path) -> dict[str, object]:
        """Without the write budget: what is measured there is the disk."""
        return super().moved_to(folder) | {"writes": None, "endurance": None}

    def kept_free(self) -> int:
        return self.settings.free_floor.bytes
