"""What `doctor` looks at in host memory: whether the region fits, and how it is mapped."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier import amounts
from kvtier.backends.cpu import huge_page_support
from kvtier.backends.cpu.leftover_regions import said_of_idle
from kvtier.backends.cpu.region import plan_region
from kvtier.backends.cpu.settings import CpuSettings
from kvtier.errors import MediumError
from kvtier.inspect import Finding, Level
from kvtier.slab.inspect import Slab
from kvtier.system import memory as memory_limits
from kvtier.system.disk import Disk, mounted

_MEMORY_SHARE_MAX = 0.8


def check_memory(area: str, settings: CpuSettings, regions: Sequence[Slab]) -> Iterator[Finding]:
    """Whether the region fits into its folder and into memory, and may be locked there."""
    folder = Path(settings.path)
    (kind, _), on_memory = mounted(folder), memory_limits.in_memory(folder)
    if on_memory:
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
    sizes = f"{amounts.size(size)} wanted, {amounts.size(free)} free in {folder}"
    stays = any(_has_size(region, size) for region in regions)
    goes = 0 if stays else max((region.size for region in regions), default=0)
    if goes:
        free += goes
        sizes += f" and {amounts.size(goes)} in the region that is made anew for that"
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
    elif (left := memory_limits.memory_left()) is not None and on_memory and size > left + goes:
        yield Finding(
            area,
            Level.WARN,
            f"{sizes}, but only {amounts.size(left + goes)} of memory: the region does not fit",
            "lower capacity, raise the container's limit, or remove what is not used (kvtier gc)"
            + idle,
        )
    else:
        yield Finding(area, Level.OK, sizes)
    memory = memory_limits.memory_given()
    if size > memory * _MEMORY_SHARE_MAX:
        of_all = f"{amounts.size(size)} of the {amounts.size(memory)}"
        what = f"{of_all} of memory that this process may use"
        remedy = "leave a fifth of it to the engine and the system: lower capacity"
        yield Finding(area, Level.WARN, what, remedy)
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
        f"only {amounts.size(soft)} may be locked, the region has {amounts.size(size)}; CUDA pins "
        "it even so, other devices may not",
        "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def _check_huge_pages(area: str, folder: Path) -> Finding:
    reason = huge_page_support.why_none(folder)
    if reason is None:
        return Finding(area, Level.OK, "huge pages can be had")
    return Finding(area, Level.WARN, f"no huge pages: {reason}", "or set huge_pages: false")
