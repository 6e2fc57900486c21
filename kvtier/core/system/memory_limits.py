"""How much memory there is, and how much may still be taken: the system refuses no larger region.

Whoever takes more than the machine or its container has is killed in the middle of it, or somebody
else is, and no message says why.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvtier.core.system.mounts import mounted

_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of a control group, in the second version and in the first: its limit, what is used of it, and
how the figures begin that count what lies below it, too."""
_SWAP = ("memory.swap.max", "memory.swap.current")
_BOTH = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", "total_")
"""Of the swap, in the second version; in the first, of memory and swap together."""
_HELD = ("AnonPages", "Shmem", "SUnreclaim", "PageTables", "KernelStack", "Hugetlb")
"""What nobody gives back. The system's own estimate of what is available does not know of some file
systems' caches (ZFS): a region that fits must not be refused."""
_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")
"""What the kernel takes back if it must: copies of what lies on disks, and of its names."""


def in_memory(folder: Path) -> bool:
    """Whether what lies in this folder is memory."""
    return mounted(folder)[0] in ("tmpfs", "ramfs")


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, of the machine and of every control group that it is
    in; None if the system does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        figures = {name: int(rest.split()[0]) << 10 for name, _, rest in _split(lines, ":")}
        swap = figures.get("SwapFree", 0)
        left = figures["MemTotal"] - sum(figures.get(name, 0) for name in _HELD)
    except (OSError, ValueError, IndexError, KeyError):
        return None
    both = left + swap
    for group in _groups(root):
        for files in _FILES:
            with contextlib.suppress(OSError, ValueError, KeyError):
                left = min(left, _left_of(group, *files))
        with contextlib.suppress(OSError, ValueError):
            most, used = [int((group / name).read_text()) for name in _SWAP]
            swap = min(swap, most - used)
        with contextlib.suppress(OSError, ValueError):
            both = min(both, _left_of(group, *_BOTH))
    return max(0, min(both, max(0, left) + max(0, swap)))


def memory_given(root: Path = Path("/")) -> int:
    """Bytes that this process may use at all: the machine's memory, or less in a container."""
    given = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups(root):
        for limit, _, _ in _FILES:
            with contextlib.suppress(OSError, ValueError):
                given = min(given, int((group / limit).read_text()))
    return given


def _left_of(group: Path, limit: str, current: str, prefix: str) -> int:
    """Raises ValueError where there is no limit."""
    most = int((group / limit).read_text())
    lines = (group / "memory.stat").read_text().splitlines()
    figures = {name: int(figure) for name, _, figure in _split(lines, " ")}
    given_back = sum(figures.get(prefix + name, 0) for name in _GIVEN_BACK)
    return most - int((group / current).read_text()) + given_back


def _groups(root: Path) -> Iterator[Path]:
    """The control groups that may limit this process's memory, those above them included. In a
    container the path may be one of outside, but then the mount itself is its group."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, managed, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if managed and "memory" not in managed.split(","):
            continue
        mount = base / "memory" if managed else base
        inner = mount / path.strip("/")
        yield inner
        yield from (each for each in inner.parents if each.is_relative_to(mount))


def _split(lines: list[str], at: str) -> Iterator[tuple[str, str, str]]:
    return (line.partition(at) for line in lines)
