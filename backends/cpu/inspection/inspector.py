"""What a CPU tier's folder holds, seen from outside: the regions of the stack's engine, and those
of its namesakes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from kvtier.backends.cpu.inspection.checks import check_memory
from kvtier.backends.cpu.inspection.filling import CpuFilling
from kvtier.backends.cpu.inspection.garbage import find_garbage
from kvtier.backends.cpu.inspection.offline_locks import region_held, remove_region
from kvtier.backends.cpu.region import read_header
from kvtier.backends.cpu.region_locks import SUFFIX, list_path
from kvtier.backends.cpu.settings import CpuSettings
from kvtier.core.slab.inspection import SlabInspector, trouble
from kvtier.core.slab.layout import SlabHeader, committed
from kvtier.core.slab.slab_files import Slab
from kvtier.errors import FormatError
from kvtier.inspect import Cleared, Depth, Finding, Garbage, Part, Reach
from kvtier.inspect.contents import Locked, locked_files, read_file, standing
from kvtier.inspect.inspector import refuse_without_room
from kvtier.settings import ByteSize, Capacity, Duration, Persistence, WritePolicy
from kvtier.system.disk import Disk
from kvtier.types import BlockKey

_PINNED_BELOW = "a tier of kind nvme below it does, and gives what is used again"
_FOR_EVER = Duration(50 * 365 * 86400.0)


class CpuInspector(SlabInspector[CpuSettings]):
    """Looks at regions: each is a slab whose table and data are one file."""

    reach = Reach.HOST

    def _look(self, depth: Depth, uses_of: str | None) -> None:
        folder, found, disk = Path(self.settings.path), self.contents, Disk()
        self.slabs, self.broken = [], []
        found.free = disk.free_bytes(folder)
        capacity = self.settings.capacity.resolve(disk.total_bytes(folder))
        try:
            paths = sorted(folder.iterdir())
        except OSError as error:
            found.troubles.append(trouble(folder, error))
            return
        locked = locked_files()
        named = _names_of(f"kvtier-{os.getuid()}-{self.settings.name}-", self.engine)
        for path in paths:
            if region := named.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    self._look_at_region(path, region[1], locked)
        found.capacity = capacity * max(1, len(self.slabs))
        self.count(found)
        found.unseen = False

    def _look_at_region(self, path: Path, engine: str, locked: Locked) -> None:
        self.contents.used += path.stat().st_size
        used = locked.has(path) or locked.has(path.with_suffix(".owner"))
        try:
            header = self.read_slab(path)
        except (FormatError, OSError) as error:
            self.note(path, error)
            return
        self.slabs.append(Slab(table=path, data=path, header=header, in_use=used, engine=engine))

    def read_slab(self, table: Path) -> SlabHeader:
        read_file(table, 0)  # raises for what is not an ordinary file, and would make `open` wait
        with table.open("rb") as file:
            return read_header(file.fileno())

    def lists(self, namespace: str) -> list[Path]:
        return [list_path(slab.table) for slab in self.slabs if slab.namespace == namespace]

    def pin(self, namespace: str, keys: Sequence[BlockKey], until: float, most: int) -> int:
        raise self._cannot("remember what is pinned", _PINNED_BELOW)

    def unpin(self, namespace: str, keys: Sequence[BlockKey] | None) -> int:
        raise self._cannot("remember what is pinned", _PINNED_BELOW)

    def held(self, slab: Slab) -> AbstractContextManager[None]:
        return region_held(slab.table)

    def remove_table(self, table: Path) -> None:
        remove_region(table, lambda: self.is_broken(table))

    def garbage(self, idle_s: float | None) -> Iterator[Garbage]:
        regions = [slab.data for slab in self.slabs]
        with self.noting_troubles():
            yield from find_garbage(Path(self.settings.path), regions, idle_s)

    def clear(self, part: Part) -> Iterator[Cleared]:
        """One region may be in use, and another not."""
        for slab in self.slabs:
            if slab.namespace != part.namespace:
                continue
            own = self.part(part.namespace)
            own.blocks = len(committed(slab.entries()))
            own.bytes = own.blocks * slab.header.slot_bytes
            yield self.try_to_clear(own, partial(remove_region, slab.table))

    def checks(self) -> Iterator[Finding]:
        self.look()
        return check_memory(self.area(), self.settings, self.slabs)

    @contextlib.contextmanager
    def measuring_place(self, room: int) -> Iterator[CpuSettings]:
        """A region under a name that no engine has; as a lower tier in a folder like any other."""
        folder = Path(self.settings.path)
        if self.tier:
            with self._measure_in(folder, room) as settings:
                yield settings
            return
        refuse_without_room(standing(folder), room)
        yield msgspec.structs.replace(
            self.settings,
            capacity=Capacity(ByteSize(room)),
            write=WritePolicy.THROUGH,
            persistence=Persistence.DISCARD,
            keep_for=_FOR_EVER,  # measuring is no occasion to tidy up after others
        )

    def filling(self) -> CpuFilling:
        return CpuFilling(self.opener, self.settings, self.context, self.capacity(), inspector=self)


def _names_of(prefix: str, name: str) -> re.Pattern[str]:
    """The files of an engine's region and of its namesakes': of data-parallel ranks, which have
    their number, and of those that found the name in use and got another."""
    engine = rf"({re.escape(name)}(?:-dp[0-9]{{1,5}})?(?:~[0-9]{{1,3}})?)"
    return re.compile(re.escape(prefix) + engine + re.escape(SUFFIX))
