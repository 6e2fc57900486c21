"""Checks the settings of an NVMe tier, and opens both halves of the tier on its folder."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.backends.nvme.medium import NvmeHandler, NvmeSpec
from kvtier.backends.nvme.settings import NvmeSettings
from kvtier.backends.nvme.tier import NvmeTier
from kvtier.backends.nvme.write_budget import leases_of
from kvtier.errors import ConfigError, NotWritable
from kvtier.eviction import create_policy, policy_class
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.interfaces.write_budget import BURST_S
from kvtier.record.record import record_bytes
from kvtier.settings import (
    ByteSize,
    Durability,
    Persistence,
    WritePolicy,
    check_capacity,
    standing_folder,
)
from kvtier.slab.folder import FolderLimits, SlabFolder, slab_bytes
from kvtier.slab.keeper import ReadOnlyFolder, ReadOnlySlabKeeper, SlabKeeper, only_reads
from kvtier.slab.layout import ENTRY_BYTES, TABLE_AT
from kvtier.system.disk import Disk

if TYPE_CHECKING:
    from kvtier.inspect import Inspector, InspectorContext

_SMALL_FILES = 64 << 10
"""Room kept for the namespace's description and the like."""


class NvmeBackend(Backend[NvmeSettings]):
    """Opens the catalogue (with its keeper) and the data side of a folder."""

    kind = "nvme"
    settings = NvmeSettings
    spec = NvmeSpec

    def check(self, settings: NvmeSettings, record_bytes: int | None) -> None:
        policy_class(settings.eviction)  # which raises ConfigError
        if not settings.path:
            raise ConfigError(".path", "is empty", "name a folder on a local disk")
        if only_reads(Path(settings.path), settings.write):
            _check_readable(Path(settings.path))
            return
        total = Disk().total_bytes(_folder_to_write(settings))
        size = settings.capacity.resolve(total)
        check_capacity(settings.capacity, size, _least(record_bytes or 4096))
        if size > total:
            raise NotWritable(
                ".capacity",
                f"{settings.capacity} is more than the whole file system of {settings.path}",
                f"write at most {ByteSize.within(total)}, or a share like 80%",
            )
        _check_budget(settings, size, record_bytes or 4096)

    def open_tier(
        self, settings: NvmeSettings, context: TierContext, disk: Disk | None = None
    ) -> NvmeTier:
        disk = disk or Disk()
        root = Path(settings.path)
        only_read = only_reads(root, settings.write)
        folder = (ReadOnlyFolder if only_read else SlabFolder)(root, context.namespace, disk)
        capacity = settings.capacity.resolve(disk.total_bytes(folder.root))
        limits = FolderLimits(
            capacity=capacity,
            free_floor=settings.free_floor.bytes,
            slot_bytes=record_bytes(context.namespace.payload_bytes),
            slab_bytes=slab_bytes(capacity),
            discard=settings.persistence is Persistence.DISCARD,
            keep_s=settings.keep_for.seconds,
            grows=settings.write is not WritePolicy.NEVER,
        )
        rate = None if only_read else settings.writes_per_second(capacity)
        leases = None if rate is None else leases_of(folder, rate, limits.slot_bytes)
        keeper = (ReadOnlySlabKeeper if only_read else SlabKeeper)(folder, limits, leases)
        allowance = None if leases is None else leases.allowance
        tier = NvmeTier(keeper, create_policy(settings.eviction), allowance=allowance)
        tier.engine = context.engine
        tier.in_files = not only_read  # workers open files to write, too
        try:
            keeper.start()
        except BaseException:  # who lives on must not seem to use the folder
            tier.close()
            raise
        return tier

    def open_handler(
        self, settings: NvmeSettings, context: TierContext, disk: Disk | None = None
    ) -> NvmeHandler:
        return NvmeHandler(
            Path(settings.path),
            context.namespace,
            threads=settings.threads,
            direct=settings.direct,
            power_safe=settings.durability is Durability.POWER,
            only_read=only_reads(Path(settings.path), settings.write),
            disk=disk,
        )

    def open_inspector(
        self, settings: NvmeSettings, context: InspectorContext
    ) -> Inspector[NvmeSettings]:
        from kvtier.backends.nvme.inspect import NvmeInspector

        return NvmeInspector(self, settings, context)

    def folder(self, settings: NvmeSettings) -> Path | None:
        path = Path(settings.path)
        return None if only_reads(path, settings.write) else path

    def identity(self, settings: NvmeSettings) -> str | None:
        return str(Path(settings.path).resolve())


def _folder_to_write(settings: NvmeSettings) -> Path:
    """The folder, or the one it will be made in; raises ConfigError if blocks cannot be kept."""
    try:
        return standing_folder(Path(settings.path), ".path")
    except NotWritable as error:
        if not Path(settings.path).is_dir():
            raise
        remedy = f"{error.remedy}, or write: never to serve only what is there"
        raise NotWritable(error.place, error.problem, remedy) from error


def _check_readable(folder: Path) -> None:
    if not os.access(folder, os.R_OK | os.X_OK):
        raise NotWritable(".path", f"no right to read {folder}", "change its owner or its rights")


def _check_budget(settings: NvmeSettings, capacity: int, block: int) -> None:
    rate = settings.writes_per_second(capacity)
    if rate is not None and rate * BURST_S < block:
        setting = ".writes" if settings.writes is not None else ".endurance"
        least = ByteSize(math.ceil(block * 86400 / BURST_S))
        raise ConfigError(
            setting, "is less than one block an hour", f"write at least writes: {least}/day"
        )


def _least(slot_bytes: int) -> int:
    """The smallest capacity with which one block can be kept."""
    return slot_bytes + ENTRY_BYTES + TABLE_AT + _SMALL_FILES


BACKEND = NvmeBackend()
