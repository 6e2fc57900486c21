"""Opens both halves of a CPU tier: makes an engine's slabs, or maps them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.backends.cpu.folder import (
    CpuFolder,
    CpuSettings,
    all_marks,
    check_owner,
    former_regions,
    in_use,
    leftovers,
    make_way,
    note_use,
    remove,
    root_of,
    said_of_idle,
    tidy_up,
)
from kvtier.backends.cpu.medium import CpuHandler, CpuSpec, Region, marks_named, marks_of
from kvtier.backends.cpu.memory import (
    NewMemory,
    begin_ahead,
    drop_ahead,
    no_huge_pages,
    taken_ahead,
)
from kvtier.backends.cpu.tier import CpuTier
from kvtier.errors import ConfigError, MediumError, NotHere, NotWritable
from kvtier.eviction import create_policy, policy_class
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.record.record import HEADER_BYTES, record_bytes
from kvtier.settings import ByteSize, Persistence, check_capacity
from kvtier.slab.files import used_bytes
from kvtier.slab.folder import FolderLimits, slab_bytes
from kvtier.slab.keeper import SlabKeeper
from kvtier.slab.layout import ENTRY_BYTES, TABLE_AT
from kvtier.system import memory as memory_limits
from kvtier.system.disk import Disk

if TYPE_CHECKING:
    from kvtier.inspect import Inspector, InspectorContext

logger = logging.getLogger(__name__)

_ROOM_S = 5.0
"""How long a new engine waits for room: for the processes of a killed one to disappear, or for a
neighbour to give some."""
_LOOK_S = 0.05
_TRIES = 3
_SLACK_SHARE, _SLACK_MAX = 256, 8 << 20
_SMALL_FILES = 4096
"""Room for the description of the namespace."""


class CpuBackend(Backend[CpuSettings]):
    """Makes or finds an engine's slabs (tier), or maps them (handler)."""

    kind = "cpu"
    settings = CpuSettings
    spec = CpuSpec
    host = True
    mapped = True

    def check(self, settings: CpuSettings, record_bytes: int | None) -> None:
        policy_class(settings.eviction)  # which raises ConfigError
        short = 0 < len(settings.name) <= 100
        if not short or "/" in settings.name or not settings.name.isprintable():
            raise ConfigError(
                ".name", f"{settings.name!r} cannot name memory", "write a short word without /"
            )
        folder = Path(settings.path)
        if not settings.path or not folder.is_dir():
            raise _no_place(NotWritable if settings.path else NotHere, settings)
        size = capacity_of(settings)
        check_capacity(settings.capacity, size, _least(record_bytes or HEADER_BYTES))
        total = Disk().total_bytes(folder)
        if size > total:
            raise NotWritable(
                ".capacity",
                f"{settings.capacity} is more than the whole of {settings.path}",
                f"write at most {ByteSize.within(total)}, or enlarge that tmpfs",
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _no_place(NotWritable, settings)

    def open_tier(
        self, settings: CpuSettings, context: TierContext, disk: Disk | None = None
    ) -> CpuTier:
        path, root, disk = Path(settings.path), root_of(settings, context.stack), disk or Disk()
        check_owner(root)
        _tidy_up_after_others(path, root)
        capacity = capacity_of(settings)
        slot = record_bytes(context.namespace.payload_bytes)
        if capacity < _least(slot):
            raise MediumError(
                f"a CPU tier of {capacity} bytes holds not one block of {slot}: raise capacity "
                f"to at least {_least(slot)} bytes"
            )
        if not in_use(root):
            if root.is_dir():
                with contextlib.suppress(OSError):  # what is wrong, the folder explains
                    make_way(root, context.namespace.id, disk)
            _check_room(root, capacity, disk)
        huge_pages, serving = settings.huge_pages, context.serving
        memory = NewMemory(root, context.near, huge_pages=huge_pages, serving=serving)
        folder = CpuFolder(root, context, disk, memory, capacity)
        limits = FolderLimits(
            capacity=capacity,
            free_floor=0,
            slot_bytes=slot,
            slab_bytes=slab_bytes(capacity),
            discard=settings.persistence is Persistence.DISCARD,
            keep_s=settings.keep_for.seconds,
            slack=min(capacity // _SLACK_SHARE, _SLACK_MAX),
        )
        keeper = SlabKeeper(folder, limits)
        note_use(root, settings.keep_for.seconds)
        policy = create_policy(settings.eviction)
        tier = CpuTier(keeper, folder, policy, settings.keep_for.seconds)
        tier.engine = context.engine
        try:
            _wait_for_room(tier, keeper, root)
            drop_ahead(path)
            if huge_pages and (reason := no_huge_pages(path)):
                logger.warning("the CPU memory in %s has no huge pages: %s", root, reason)
            keeper.start()
        except BaseException:  # who lives on must not seem to use it
            tier.close()
            raise
        return tier

    def open_handler(self, settings: CpuSettings, context: TierContext) -> CpuHandler:
        root = root_of(settings, context.stack)
        found = marks_named(all_marks(root), context.engine)
        if len(found) != 1:
            raise MediumError(
                f"cannot open the CPU memory of {context.engine!r} in {root}: its engine makes it "
                "first"
            )
        return CpuHandler(Region.attach(found[0]), partial(tidy_up, root))

    def attach(self, path: Path) -> Region:
        return Region.attach(path)

    def find_region(self, settings: CpuSettings, engine: str) -> Path | None:
        begin = f"kvtier-{os.getuid()}-{settings.name}-"
        roots = [root for root in Path(settings.path).glob(f"{begin}*") if root.is_dir()]
        found = marks_of([mark for root in roots for mark in all_marks(root)], engine)
        return found[0] if len(found) == 1 else None

    def begin_memory(self, settings: CpuSettings, near: Sequence[int]) -> None:
        path, size = Path(settings.path), capacity_of(settings)
        begin = f"kvtier-{os.getuid()}-{settings.name}-"
        if any(path.glob(f"{begin}*/*/*.slab")):  # one may have it already
            return
        each = slab_bytes(size)
        sizes = [each] * (size // each) + [size % each] * bool(size % each)
        memory = NewMemory(path, near, huge_pages=settings.huge_pages, serving=True)
        begin_ahead(path, sizes, memory)

    def open_inspector(
        self, settings: CpuSettings, context: InspectorContext
    ) -> Inspector[CpuSettings]:
        from kvtier.backends.cpu.inspect import CpuInspector

        return CpuInspector(self, settings, context)

    def identity(self, settings: CpuSettings) -> str | None:
        return str(Path(settings.path).resolve() / settings.name)


def _no_place(kind: type[NotHere], settings: CpuSettings) -> NotHere:
    problem = f"{settings.path or 'an empty text'} is not a folder where you may write"
    return kind(".path", problem, "name a folder on tmpfs, like /dev/shm")


def _least(slot_bytes: int) -> int:
    """With less there is no room for one block, beside what tells of it."""
    return TABLE_AT + _SMALL_FILES + slot_bytes + ENTRY_BYTES


def capacity_of(settings: CpuSettings) -> int:
    """In bytes."""
    return settings.capacity.resolve(Disk().total_bytes(Path(settings.path)))


def _tidy_up_after_others(path: Path, own: Path) -> None:
    for root in leftovers(path, time.time()):
        if root != own and remove(root):
            logger.info("CPU memory in %s is removed: nobody uses it any more", root)
    for file in former_regions(path):
        file.unlink(missing_ok=True)


def _check_room(root: Path, capacity: int, disk: Disk) -> None:
    """Where nobody else has memory, an engine gets all that it wants, or says why it cannot."""
    there = (used_bytes(root) if root.is_dir() else 0) + taken_ahead(root.parent)
    free = disk.free_bytes(root.parent) if root.parent.is_dir() else capacity
    if capacity > there + free:
        raise MediumError(
            f"cannot take {capacity} bytes of CPU memory in {root.parent}, of which {free} are "
            "free: lower the cpu tier's capacity, or give shared memory more room (in containers: "
            "--shm-size)" + said_of_idle(root.parent, root)
        )
    left = memory_limits.memory_left() if memory_limits.in_memory(root.parent) else None
    if left is not None and capacity > there + left:  # the system would not refuse, but kill
        raise MediumError(
            f"{capacity} bytes of CPU memory do not fit into memory, of which {left} bytes are "
            "free (on this machine, or below its container's limit): lower the cpu tier's "
            "capacity, raise the limit, or remove memory that nobody uses (kvtier gc)"
            + said_of_idle(root.parent, root)
        )


def _wait_for_room(tier: CpuTier, keeper: SlabKeeper, root: Path) -> None:
    """Have the first slab. Beside neighbours that have all, an engine serves what they hold, and
    stores nothing yet; raises MediumError where nobody has any that it could serve. Neighbours of
    another model, or of another rank of this one, are given time to hand over what they have."""
    end, tries = time.monotonic() + _ROOM_S, 0
    while not tier.has_room:
        tries += 1
        if tier.others_have_all and (time.monotonic() >= end or not tier.others_may_give):
            logger.warning("there is no room in %s yet: other engines have it", root)
            return
        tried = tries > _TRIES and (keeper.trouble or time.monotonic() >= end)
        if tried and not tier.others_have_all:
            raise MediumError(
                f"cannot make CPU memory in {root} ({keeper.trouble or 'there is no room'}): set "
                "the cpu tier's path to a folder on tmpfs where you may write, and that has room"
            )
        time.sleep(_LOOK_S)
        tier.refresh()


BACKEND = CpuBackend()
