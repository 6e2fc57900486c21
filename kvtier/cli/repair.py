"""Taking bad blocks and broken slabs out of use, where no live process owns them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvtier.backends.nvme.folder.files import remove_slab
from kvtier.backends.nvme.folder.lock import folder_locked
from kvtier.cli.blocks import Block, entry_of
from kvtier.cli.console import said_of
from kvtier.cli.hold import (
    has_live_owner,
    has_owner_now,
    region_held,
    remove_region,
)
from kvtier.cli.holdings import Place, Slab
from kvtier.cli.look_slabs import is_broken
from kvtier.config import StackConfig
from kvtier.core.slab.layout import BAD, VALID, entry_at
from kvtier.core.system.disk import Disk
from kvtier.errors import KVTierError, MediumInUse


def quarantine(slab: Slab, blocks: Sequence[Block]) -> int:
    """Mark these slots so that no engine takes them over; raises MediumInUse if one has them."""
    if slab.table == slab.data:
        with region_held(slab.table):
            return _mark(slab, blocks)
    home = slab.table.parent
    with folder_locked(home.parent):
        if has_owner_now(slab.table):
            raise MediumInUse(f"{slab.table} is in use: stop its engine first")
        return _mark(slab, blocks)


def _mark(slab: Slab, blocks: Sequence[Block]) -> int:
    marked = 0
    fd = os.open(slab.table, os.O_RDWR | os.O_CLOEXEC)
    try:
        for block in blocks:
            if entry_of(slab, block.slot) == (VALID, block.key):
                marked += os.pwrite(fd, bytes([BAD]), entry_at(block.slot))
    finally:
        os.close(fd)
    return marked


def drop_objects(config: StackConfig, tier: int, blocks: Sequence[Block]) -> int:
    """Delete bad objects: a reader that meets the gap counts a miss."""
    from kvtier.cli.look_objects import delete_objects

    return delete_objects(config.tiers[tier], [block.name for block in blocks])


def remove_broken(place: Place, namespace: str) -> list[str]:
    """Remove slabs whose table or data cannot be what kvtier writes, all or those in one
    namespace's folder, and take back what was said of them; what was left, and why."""
    left = []
    for path in place.broken:
        if not path.parent.name.startswith(namespace):
            continue
        place.troubles = [text for text in place.troubles if not text.startswith(f"{path}: ")]
        try:
            if place.kind == "cpu":
                remove_region(path, partial(is_broken, place.kind, path))
            else:
                _remove_slab(path)
        except FileNotFoundError:  # somebody else has just removed it
            continue
        except (KVTierError, OSError) as error:
            left.append(said_of(error))
    return left


def _remove_slab(table: Path) -> None:
    home = table.parent
    with folder_locked(home.parent):
        if has_live_owner(home):
            raise MediumInUse(f"{table} is broken, and {home} is in use: stop its engines first")
        if not is_broken("nvme", table):  # any more
            return
        remove_slab(Disk(), table)
