"""CPU memory seen from outside: what the engines of a stack hold there, and whether it fits."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvtier import amounts
from kvtier.backends.cpu.folder import (
    CpuSettings,
    all_marks,
    former_regions,
    in_use,
    leftovers,
    remove,
    root_of,
    said_of_idle,
)
from kvtier.backends.cpu.medium import engine_of
from kvtier.backends.cpu.memory import no_huge_pages
from kvtier.errors import KVTierError, MediumInUse
from kvtier.inspect import Finding, Garbage, Level, Reach
from kvtier.inspect.contents import of_file, size_below, standing
from kvtier.inspect.inspector import refuse_without_room
from kvtier.interfaces.backend import TierContext
from kvtier.settings import ByteSize, Capacity, Duration, Persistence, WritePolicy
from kvtier.slab.files import held, used_bytes
from kvtier.slab.folder_inspect import FolderFilling, FolderInspector
from kvtier.system import memory as memory_limits
from kvtier.system.disk import Disk, mounted
from kvtier.types import BlockKey, Namespace

_PINNED_BELOW = "a tier of kind nvme below it does, and gives what is used again"
_FOR_EVER = Duration(50 * 365 * 86400.0)
_MEMORY_SHARE_MAX = 0.8


class CpuInspector(FolderInspector[CpuSettings]):
    """Looks at the folder of a stack's engines."""

    reach = Reach.HOST

    @property
    def root(self) -> Path:
        return root_of(self.settings, self.engine)

    def engine_of(self, mark: Path) -> str:
        return engine_of(mark)

    def pin(self, namespace: str, keys: Sequence[BlockKey], until: float, most: int) -> int:
        raise self._cannot("remember what is pinned", _PINNED_BELOW)

    def unpin(self, namespace: str, keys: Sequence[BlockKey] | None) -> int:
        raise self._cannot("remember what is pinned", _PINNED_BELOW)

    def garbage(self, idle_s: float | None) -> Iterator[Garbage]:
        """All folders that nobody will come back to; of these, the stack's also if it is idle for
        so long: others lie beside it, and were not asked about."""
        path, what = Path(self.settings.path), "memory that nobody will come back to"
        left = leftovers(path, time.time())
        for root in left:
            if root.exists():
                yield Garbage(what, str(root), size_below(root), partial(remove, root))
        for file in former_regions(path):
            yield from of_file("memory of a kvtier before this one", file, partial(_unlink, file))
        if self.root not in left:
            yield from super().garbage(idle_s)

    def checks(self) -> Iterator[Finding]:
        return check_memory(self.area(), self.settings, self.root)

    @contextlib.contextmanager
    def measuring_place(self, room: int) -> Iterator[CpuSettings]:
        """A folder with a name that no engine has; as a lower tier in a folder like any other."""
        folder = Path(self.settings.path)
        if self.tier:
            with self._measure_in(folder, room) as settings:
                yield settings
            return
        refuse_without_room(standing(folder), room)
        yield msgspec.structs.replace(
            self.settings,
            name=f"bench-{os.getpid()}",
            capacity=Capacity(ByteSize(room)),
            write=WritePolicy.THROUGH,
            persistence=Persistence.DISCARD,
            keep_for=_FOR_EVER,  # measuring is no occasion to tidy up after others
        )

    def filling(self) -> CpuFilling:
        given = self.opener, self.settings, self.context, self.capacity()
        return CpuFilling(*given, inspector=self)


class CpuFilling(FolderFilling[CpuSettings]):
    """Fills memory that no engine uses meanwhile: of one that runs it would take room."""

    one_namespace = "host memory"

    def __init__(self, *args: Any, inspector: CpuInspector) -> None:
        super().__init__(*args, root=inspector.root)
        self._inspector = inspector

    def check(self, namespace: Namespace) -> None:
        if in_use(self.root):
            raise MediumInUse(
                f"the CPU memory in {self.root} is in use: stop its engines, or fill a tier below"
            )
        for part in self._inspector.look().parts:
            if part.namespace != namespace.id and part.blocks:
                other = part.namespace[:12]
                raise KVTierError(
                    f"the CPU memory in {self.root} holds {part.blocks} blocks of the namespace "
                    f"{other}, and would hold this one instead: remove them (kvtier clear {other} "
                    "--tier cpu), or fill another tier"
                )

    def tier_context(self, namespace: Namespace) -> TierContext:
        context = super().tier_context(namespace)
        return msgspec.structs.replace(context, stack=self.engine)


def _unlink(file: Path) -> bool:
    file.unlink(missing_ok=True)
    return True


def check_memory(area: str, settings: CpuSettings, root: Path) -> Iterator[Finding]:
    """Whether the memory fits into its folder and into the machine, and may be locked there."""
    folder = Path(settings.path)
    (kind, _), on_memory = mounted(folder), memory_limits.in_memory(folder)
    if on_memory:
        yield Finding(area, Level.OK, f"{folder} is {kind}")
    else:
        yield Finding(
            area,
            Level.WARN,
            f"{folder} is {kind}, not memory: blocks will be written to a disk",
            "set path to a folder on tmpfs, like /dev/shm",
        )
    disk = Disk()
    size = settings.capacity.resolve(disk.total_bytes(folder))
    there = used_bytes(root) if root.is_dir() else 0
    more, free = max(0, size - there), disk.free_bytes(folder)
    sizes = f"{amounts.size(size)} wanted, {amounts.size(free)} free in {folder}"
    if there:
        sizes += f" beside {amounts.size(there)} that the stack has there"
    idle = said_of_idle(folder, root)
    left = memory_limits.memory_left() if on_memory else None
    if free < more:
        yield Finding(
            area,
            Level.WARN,
            f"{sizes}: it does not fit",
            "lower capacity, or enlarge it: mount -o remount,size=... (containers: --shm-size)"
            + idle,
        )
    elif left is not None and more > left:
        yield Finding(
            area,
            Level.WARN,
            f"{sizes}, but only {amounts.size(left)} of memory: it does not fit",
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
    yield from _check_engines(area, all_marks(root) if root.is_dir() else [])


def _check_engines(area: str, marks: Sequence[Path]) -> Iterator[Finding]:
    """Which engines share it now."""
    names = sorted(engine_of(mark) for mark in marks if held(mark))
    if len(names) > 1:
        yield Finding(area, Level.OK, f"{len(names)} engines share it: {', '.join(names)}")


def _check_locking(area: str, size: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size:
        return Finding(area, Level.OK, "memory may be locked")
    return Finding(
        area,
        Level.NOTE,
        f"only {amounts.size(soft)} may be locked, the tier has {amounts.size(size)}; CUDA pins "
        "it even so, other devices may not",
        "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
    )


def _check_huge_pages(area: str, folder: Path) -> Finding:
    reason = no_huge_pages(folder)
    if reason is None:
        return Finding(area, Level.OK, "huge pages can be had")
    return Finding(area, Level.WARN, f"no huge pages: {reason}", "or set huge_pages: false")
