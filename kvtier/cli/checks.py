"""What `kvtier doctor` looks at on this machine: memory, disks, devices, vLLM."""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvtier.backends.cpu import CpuSettings, huge_page_support, memory_limits
from kvtier.backends.cpu.region import plan_region, said_of_idle
from kvtier.backends.nvme import NvmeSettings, slab_bytes
from kvtier.backends.nvme.folder.files import TABLE_SUFFIX, homes, slab_files, used_bytes
from kvtier.backends.nvme.folder.folder import WHOSE, kept_free
from kvtier.backends.nvme.housekeeping.read_only_keeper import only_reads
from kvtier.cli.holdings import Slab, standing
from kvtier.cli.look_slabs import look_at_regions
from kvtier.config import StackConfig
from kvtier.core.settings import Gds, WritePolicy
from kvtier.core.system.disk import Disk
from kvtier.core.system.mounts import mounted
from kvtier.core.system.numa import Topology
from kvtier.device.direct.kvikio_driver import probe as probe_gds
from kvtier.errors import ConfigError, MediumError
from kvtier.observe import human
from kvtier.vllm.hooks.versions import installed

_BLOCK = 4096
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "glusterfs"}
_MEMORY_SHARE_MAX = 0.8


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing has to be done."""
    WARN = "warn"
    """It works, but not as well as it could."""
    BAD = "bad"
    """It will not work."""


class Finding(msgspec.Struct):
    """One thing that was looked at, and what to do about it."""

    area: str
    level: Level
    what: str
    remedy: str = ""


def check_machine() -> Iterator[Finding]:
    """What concerns all tiers."""
    try:
        vllm = installed()
        kind = " (CPU build)" if vllm.cpu else ""
        yield Finding("vllm", Level.OK, f"vLLM {vllm.version}{kind} is supported")
    except ConfigError as error:
        known = "not installed" not in error.problem
        level = Level.BAD if known else Level.NOTE
        yield Finding("vllm", level, f"vLLM {error.problem}", error.remedy)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < 1024:
        yield Finding(
            "files",
            Level.WARN,
            f"a process may open {limit} files",
            "raise it to 4096 or more: ulimit -n 4096",
        )
    machine = Topology()
    if len(machine.nodes) > 1:
        gpus = [str(node) for node in machine.gpus() if node is not None]
        where = f"GPUs are at {', '.join(gpus)}" if gpus else "no GPU says where it is"
        yield Finding("numa", Level.OK, f"{len(machine.nodes)} NUMA nodes; {where}")


def check_order(config: StackConfig) -> Iterator[Finding]:
    """What tiers get from those above them, where that may be another thing than was meant."""
    disk: int | None = None
    for tier, settings in enumerate(config.tiers):
        if settings.write is not WritePolicy.THROUGH:
            disk = None
            continue
        if tier and config.tiers[tier - 1].write is WritePolicy.ON_EVICT:
            yield Finding(
                f"{tier} {settings.kind}",
                Level.NOTE,
                f"gets what tier {tier - 1} has, and that only what the tier above it lets go",
                f"with write: through in tier {tier - 1} it gets every block at once",
            )
        if settings.kind == "nvme" and disk is not None:
            yield Finding(
                f"{tier} {settings.kind}",
                Level.NOTE,
                f"holds the same blocks as tier {disk}",
                "two disks that are joined to one file system (RAID 0, LVM) hold twice as many",
            )
        if settings.kind == "nvme":
            disk = tier


def check_tier(config: StackConfig, tier: int) -> Iterator[Finding]:
    """What concerns one tier."""
    settings = config.tiers[tier]
    area = f"{tier} {settings.kind}"
    if isinstance(settings, CpuSettings):
        yield from _check_memory(area, settings, look_at_regions(tier, config).slabs)
    elif isinstance(settings, NvmeSettings):
        yield from _check_disk(area, settings)
        if only_reads(Path(settings.path), settings.write):
            yield Finding(area, Level.OK, f"{settings.path} is only read, and may be")
        else:
            if settings.direct:
                yield _check_direct(area, Path(settings.path))
            yield _check_room(area, settings)
            yield from _check_owners(area, Path(settings.path))
            yield from _check_gds(area, config.gds, settings)
    elif settings.kind == "object":
        from kvtier.backends.object import ObjectSettings
        from kvtier.cli.check_store import check_store

        assert isinstance(settings, ObjectSettings)
        yield from check_store(area, settings)


# -- host memory -----------------------------------------------------------------------------


def _check_memory(area: str, settings: CpuSettings, regions: Sequence[Slab]) -> Iterator[Finding]:
    folder = Path(settings.path)
    (kind, _), in_memory = mounted(folder), memory_limits.in_memory(folder)
    if in_memory:
        yield Finding(area, Level.OK, f"{folder} is {kind}")
    else:
        yield Finding(
            area,
            Level.WARN,
            f"{folder} is {kind}, not memory: the region will be written to a disk",
            "set path to a folder on tmpfs, like /dev/shm",
        )
    disk = Disk()
    size = settings.capacity.resolve(disk.total_bytes(folder))
    free = disk.free_bytes(folder)
    sizes = f"{human.size(size)} wanted, {human.size(free)} free in {folder}"
    stays = any(_has_size(region, size) for region in regions)
    goes = 0 if stays else max((region.bytes for region in regions), default=0)
    if goes:
        free += goes
        sizes += f" and {human.size(goes)} in the region that is made anew for that"
    idle = said_of_idle(folder, [region.data for region in regions])
    if stays:
        yield Finding(area, Level.OK, f"{sizes}, and its region is there already")
    elif free < size:
        yield Finding(
            area,
            Level.WARN,
            f"{sizes}: the region does not fit",
            "lower capacity, or enlarge it: mount -o remount,size=... (containers: --shm-size)"
            + idle,
        )
    elif (left := memory_limits.memory_left()) is not None and in_memory and size > left + goes:
        yield Finding(
            area,
            Level.WARN,
            f"{sizes}, but only {human.size(left + goes)} of memory: the region does not fit",
            "lower capacity, raise the container's limit, or remove what is not used (kvtier gc)"
            + idle,
        )
    else:
        yield Finding(area, Level.OK, sizes)
    memory = memory_limits.memory_given()
    if size > memory * _MEMORY_SHARE_MAX:
        yield Finding(
            area,
            Level.WARN,
            f"{human.size(size)} of the {human.size(memory)} of memory that this process may use",
            "leave a fifth of it to the engine and the system: lower capacity",
        )
    yield _check_locking(area, size)
    if settings.huge_pages:
        yield _check_huge_pages(area, folder)


def _has_size(region: Slab, capacity: int) -> bool:
    """Whether an engine with this capacity takes the region over as it is."""
    found = region.header
    try:
        wanted = plan_region(capacity, found.slot_bytes, found.namespace, discard=False)
    except MediumError:  # not even one block
        return False
    return wanted.slots == found.slots


def _check_locking(area: str, size: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size:
        return Finding(area, Level.OK, "memory may be locked")
    return Finding(
        area,
        Level.NOTE,
        f"only {human.size(soft)} may be locked, the region has {human.size(size)}; CUDA pins it "
        "even so, other devices may not",
        "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def _check_huge_pages(area: str, folder: Path) -> Finding:
    reason = huge_page_support.why_none(folder)
    if reason is None:
        return Finding(area, Level.OK, "huge pages can be had")
    return Finding(area, Level.WARN, f"no huge pages: {reason}", "or set huge_pages: false")


# -- disks -----------------------------------------------------------------------------------


def _check_disk(area: str, settings: NvmeSettings) -> Iterator[Finding]:
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


def _check_gds(area: str, mode: Gds, settings: NvmeSettings) -> Iterator[Finding]:
    """Try what workers would: to read a file straight into GPU memory."""
    if mode is Gds.OFF:
        return
    folder = Path(settings.path)
    reason = probe_gds(folder)
    if reason is None:
        yield Finding(area, Level.OK, "GPUDirect Storage works here")
    elif mode is Gds.REQUIRE:
        yield Finding(
            area,
            Level.BAD,
            f"GPUDirect Storage is required, but {reason}",
            "mend that, or set gds: auto to go through pinned memory",
        )
    else:
        yield Finding(
            area,
            Level.NOTE,
            f"no GPUDirect Storage: {reason}",
            "blocks go through pinned memory, which is what most machines do",
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
    what = f"{human.size(size)} allowed, room for {human.size(max(0, left))}"
    if left <= 0:
        return Finding(
            area, Level.BAD, f"{what}: nothing can be stored", "free some, or lower free_floor"
        )
    if used > size:
        return Finding(
            area,
            Level.WARN,
            f"{human.size(used)} taken, where {human.size(size)} are allowed",
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
