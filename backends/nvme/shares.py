"""How the engines that live in a folder divide its room."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvtier.backends.nvme.files import held, homes, marks, used_bytes
from kvtier.backends.nvme.folder import Limits, NvmeFolder, SlabFile
from kvtier.backends.nvme.news import News


class Shares:
    """One engine's part of a folder: whether it has too little, or too much while others starve."""

    def __init__(self, folder: NvmeFolder, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._hungry = False

    def begin_again(self) -> None:
        """Its owner's file is a new one, and says nothing."""
        self._hungry = False

    def tell(self, owner_fd: int, hungry: bool) -> None:
        """Let the neighbours know whether it lacks room."""
        if hungry != self._hungry:
            os.pwrite(owner_fd, b"hungry" if hungry else b"\0\0\0\0\0\0", 0)
            self._hungry = hungry

    def lacks(self, owner: int, mine: Sequence[SlabFile], more: int) -> bool:
        """Whether so many bytes more, for which there is no room, would be within its share."""
        if not mine:
            return True
        living, _ = self._folder.hungry_neighbours(owner)
        return _bytes_of(mine) + more <= self._fair(living)

    def excess(self, owner: int, mine: Sequence[SlabFile]) -> News | None:
        """A slab to give away, because neighbours starve, or to give up, because the folder is over
        its limits: the coldest."""
        if not mine:
            return None
        folder, limits = self._folder, self._limits
        used = used_bytes(folder.root)
        over = used > limits.capacity or folder.disk.free_bytes(folder.root) < limits.free_floor
        remove = True
        if not over:
            if len(mine) == 1:
                return None
            living, starving = folder.hungry_neighbours(owner)
            if not starving or _bytes_of(mine) <= self._fair(living):
                return None
            remove = folder.namespace.id not in starving
        return News(min(mine, key=lambda slab: folder.last_used(slab.id)), remove=remove)

    def _fair(self, living: int) -> int:
        """Of what the folder may hold, or does hold where its disk is full before that, without
        what idle models keep: nobody is there to hand it over."""
        served = [home for home in homes(self._folder.root) if any(map(held, marks(home)))]
        used = sum(map(used_bytes, served))
        return min(used, self._limits.capacity) // max(1, living)


def _bytes_of(slabs: Sequence[SlabFile]) -> int:
    return sum(slab.header.slots * slab.header.slot_bytes for slab in slabs)
