"""Makes or finds a CPU region, and opens both halves of the tier on it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.backends.cpu import early_memory, huge_page_support, sharing
from kvtier.backends.cpu.handler import CpuHandler
from kvtier.backends.cpu.leftover_regions import leftovers, regions, remove, unfinished
from kvtier.backends.cpu.owned_region import OwnedRegion
from kvtier.backends.cpu.region import Region, least_capacity, plan_region
from kvtier.backends.cpu.region_locks import SUFFIX, in_use
from kvtier.backends.cpu.settings import CpuSettings
from kvtier.backends.cpu.tier import CpuSpec, CpuTier
from kvtier.errors import ConfigError, NotHere, NotWritable
from kvtier.eviction import create_policy, policy_class
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.record.record import HEADER_BYTES, record_bytes
from kvtier.settings import ByteSize, Persistence, check_capacity
from kvtier.system.disk import Disk

if TYPE_CHECKING:
    from kvtier.inspect import Inspector, InspectorContext

logger = logging.getLogger(__name__)


class CpuBackend(Backend[CpuSettings]):
    """Makes or finds the region (tier), or maps it (handler)."""

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
                ".name", f"{settings.name!r} cannot name a region", "write a short word without /"
            )
        folder = Path(settings.path)
        if not settings.path or not folder.is_dir():
            raise _no_place(NotWritable if settings.path else NotHere, settings)
        size = _capacity(settings)
        check_capacity(settings.capacity, size, least_capacity(record_bytes or HEADER_BYTES))
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
        folder = Path(settings.path)
        path = region_path(settings, context)
        for each in leftovers(folder, time.time()) + unfinished(folder):
            if each != path and remove(each):
                logger.info("CPU region %s is removed: nobody uses it any more", each)
        discard = settings.persistence is Persistence.DISCARD
        wanted = plan_region(
            _capacity(settings),
            record_bytes(context.namespace.payload_bytes),
            context.namespace.digest,
            discard=discard,
        )
        huge_pages, serving = settings.huge_pages, context.serving
        owned = OwnedRegion(
            path, wanted, disk or Disk(), context.near, huge_pages=huge_pages, serving=serving
        )
        early_memory.drop(folder)
        owned.region.keep_for(settings.keep_for.seconds)
        if huge_pages and (reason := huge_page_support.why_none(folder)):
            logger.warning("the CPU region %s has no huge pages: %s", path, reason)
        return CpuTier(owned, create_policy(settings.eviction), discard=discard)

    def open_handler(self, settings: CpuSettings, context: TierContext) -> CpuHandler:
        return CpuHandler(Region.attach(region_path(settings, context)))

    def attach(self, path: Path) -> Region:
        return Region.attach(path)

    def find_region(self, settings: CpuSettings, engine: str) -> Path | None:
        found = [path for path in regions(Path(settings.path)) if sharing.is_of(path, engine)]
        found = [path for path in found if in_use(path)]
        return found[0] if len(found) == 1 else None

    def begin_memory(self, settings: CpuSettings, near: Sequence[int]) -> None:
        folder = Path(settings.path)
        if not any(folder.glob(f"{_named(settings)}-*{SUFFIX}")):  # one may have it already
            early_memory.begin(folder, _capacity(settings), near, huge_pages=settings.huge_pages)

    def open_inspector(
        self, settings: CpuSettings, context: InspectorContext
    ) -> Inspector[CpuSettings]:
        from kvtier.backends.cpu.inspection.inspector import CpuInspector

        return CpuInspector(self, settings, context)

    def identity(self, settings: CpuSettings) -> str | None:
        return str(Path(settings.path).resolve() / _named(settings))


def _no_place(kind: type[NotHere], settings: CpuSettings) -> NotHere:
    problem = f"{settings.path or 'an empty text'} is not a folder where you may write"
    return kind(".path", problem, "name a folder on tmpfs, like /dev/shm")


def region_path(settings: CpuSettings, context: TierContext) -> Path:
    """Where the region of an engine lies."""
    return Path(settings.path) / f"{_named(settings)}-{context.engine}{SUFFIX}"


def _named(settings: CpuSettings) -> str:
    """How the names of its regions begin, whatever the engine."""
    return f"kvtier-{os.getuid()}-{settings.name}"


def _capacity(settings: CpuSettings) -> int:
    return settings.capacity.resolve(Disk().total_bytes(Path(settings.path)))


BACKEND = CpuBackend()
