"""How the engines that live in a folder divide its room."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterable, Sequence

import msgspec

from kvtier.backends.nvme.folder.files import held, homes, marks, owner_path, used_bytes
from kvtier.backends.nvme.folder.folder import NvmeFolder
from kvtier.backends.nvme.folder.limits import Limits
from kvtier.backends.nvme.folder.slab_file import SlabFile
from kvtier.backends.nvme.housekeeping.updates import SlabUpdate
from kvtier.settings import ByteSize

logger = logging.getLogger(__name__)

_SAID = struct.Struct("<6s2xQ")
_HUNGRY = b"hungry"


class Neighbours(msgspec.Struct):
    """What those who store in a folder say in their marks."""

    living: int
    """How many they are, with us."""
    capacity: int
    """The largest that one of them allows to all."""
    lacking_room: set[str] = msgspec.field(default_factory=set)
    """The namespaces of others that wait for room."""
    stored: set[str] = msgspec.field(default_factory=set)
    """The namespaces for which one of the others stores."""
    read: set[str] = msgspec.field(default_factory=set)
    """Those of others who only read."""


class Shares:
    """One engine's part of a folder: whether it has too little, or too much while others lack room.

    Where settings differ, the largest capacity of those that live and store counts. By its own, who
    has less would give up all that it is handed, again and again, until nothing is left.
    """

    def __init__(self, folder: NvmeFolder, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._said: bytes | None = None
        self._said_larger = False

    def begin_again(self) -> None:
        """Its owner's file is a new one, and says nothing."""
        self._said = None

    def introduce(self, owner_fd: int) -> None:
        """Let the neighbours know what we allow to all, before there is anything of ours."""
        if self._said is None:
            with contextlib.suppress(OSError):  # on a full disk there is no room for a word either
                self.tell(owner_fd, lacks_room=False)

    def tell(self, owner_fd: int, lacks_room: bool) -> None:
        """Let the neighbours know whether it lacks room."""
        capacity = self._limits.capacity if self._limits.grows else 0
        said = _SAID.pack(_HUNGRY if lacks_room else b"", capacity)
        if said != self._said:
            os.pwrite(owner_fd, said, 0)
            self._said = said

    def neighbours(self, owner: int) -> Neighbours:
        """Who lives in the whole folder. Who only reads has no part of it."""
        found = Neighbours(int(self._limits.grows), self._limits.capacity)
        mine = owner_path(self._folder.owners, owner)
        for path in [path for home in homes(self._folder.root) for path in marks(home)]:
            if path == mine or not held(path):
                continue
            with contextlib.suppress(OSError, struct.error):
                word, capacity = _SAID.unpack(path.read_bytes())
                found.living += capacity > 0
                found.capacity = max(found.capacity, capacity)
                namespace = path.parent.parent.name
                (found.stored if capacity else found.read).add(namespace)
                if word == _HUNGRY:
                    found.lacking_room.add(namespace)
        if found.capacity > self._limits.capacity and self._limits.grows and not self._said_larger:
            self._said_larger = True
            logger.warning(
                "engines that share %s have different capacities: while one runs with %s, the %s "
                "of this one do not count; write the same in all stacks",
                self._folder.root,
                ByteSize(found.capacity),
                ByteSize(self._limits.capacity),
            )
        return found

    def limits(
        self, owner: int, mine: Sequence[SlabFile], slabs: Iterable[SlabFile]
    ) -> Limits | None:
        """What counts for one more slab beside these; None if others wait for the room."""
        found = self.neighbours(owner)
        more = _bytes_of(mine) + self._limits.slab_bytes
        if mine and found.lacking_room and more > self._fair(found):
            return None
        capacity = found.capacity - self._folder.cut_off(slabs)
        return msgspec.structs.replace(self._limits, capacity=capacity)

    def lacks(self, owner: int, mine: Sequence[SlabFile], more: int) -> bool:
        """Whether so many bytes more, for which there is no room, would be within its share. Never
        below its own floor: what neighbours left to it there it would give up at once."""
        if self._below_floor:
            return False
        if not mine:
            return True
        return _bytes_of(mine) + more <= self._fair(self.neighbours(owner))

    def excess(self, owner: int, mine: Sequence[SlabFile]) -> SlabUpdate | None:
        """The coldest slab: to give away because neighbours lack room, or to give up because the
        folder is over its limits. Before that, idle models lose what is beyond their share."""
        if not mine:
            return None
        folder, found = self._folder, self.neighbours(owner)
        over, remove = self._over(found), True
        if over and self._limits.grows:
            with folder.locked():
                if folder.reclaim(self._of_all(found), 0):
                    return None
                over = self._over(found)  # or have others done that, while we waited for the lock
        if not over:
            if not found.lacking_room or self._keeps(mine, found):
                return None
            remove = folder.namespace.id not in found.lacking_room
        return SlabUpdate(min(mine, key=lambda slab: folder.last_used(slab.id)), remove=remove)

    def _keeps(self, mine: Sequence[SlabFile], found: Neighbours) -> bool:
        """Whether what we have is within our share. Who only reads has none, but for that of its
        model while nobody stores for that: it is kept as if nobody read it, beside other such."""
        if self._limits.grows:
            return len(mine) == 1 or _bytes_of(mine) <= self._fair(found)
        used = max(self._folder.last_used(slab.id) for slab in mine)
        own = self._folder.namespace.id
        if own in found.stored or abs(time.time() - used) > self._limits.keep_s:
            return False
        only_read = found.read - found.stored | {own}
        with_them = msgspec.structs.replace(found, living=found.living + len(only_read))
        return used_bytes(self._folder.home) <= self._fair(with_them)

    def _over(self, found: Neighbours) -> bool:
        """Whether the folder is over its limits. Who only reads does not know its capacity."""
        too_much = self._limits.grows and used_bytes(self._folder.root) > found.capacity
        return too_much or self._below_floor

    @property
    def _below_floor(self) -> bool:
        folder = self._folder
        return folder.disk.free_bytes(folder.root) < self._limits.free_floor

    def _fair(self, found: Neighbours) -> int:
        """An equal part of what the folder may hold, or can where its disk is full before that,
        without what idle models keep: nobody is there to hand that over. Room that was left to
        others counts before they take it, too: else giving would go on until they do."""
        used = used_bytes(self._folder.root)
        idle = [home for home in homes(self._folder.root) if not any(map(held, marks(home)))]
        room = self._folder.bound(self._of_all(found), used) - sum(map(used_bytes, idle))
        return max(0, room) // max(1, found.living)

    def _of_all(self, found: Neighbours) -> Limits:
        return msgspec.structs.replace(self._limits, capacity=found.capacity)


def _bytes_of(slabs: Sequence[SlabFile]) -> int:
    return sum(slab.header.data_end for slab in slabs)
