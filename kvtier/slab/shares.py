"""The room of a folder: new slabs, and how it is divided among the engines that live there and the
models that nobody serves at the moment.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from kvtier.errors import FormatError
from kvtier.settings import ByteSize
from kvtier.slab import retention_list
from kvtier.slab.files import (
    DATA_SUFFIX,
    SAID_BYTES,
    TABLE_BYTES_MAX,
    TABLE_SUFFIX,
    FolderBusy,
    SlabFile,
    file_sizes,
    halves,
    held,
    homes,
    is_empty,
    is_newer,
    length,
    list_files,
    marks,
    owner_path,
    pins_path,
    read_part,
    remove_bare_home,
    remove_slab,
    slab_files,
    take_away,
    unfinished,
    used_at,
    used_bytes,
)
from kvtier.slab.folder import MAKING_SUFFIX, NO_ROOM, FolderLimits, SlabFolder
from kvtier.slab.layout import (
    ENTRY_BYTES,
    FLAG_DISCARD,
    OWNER,
    OWNER_AT,
    SLOTS_MAX,
    TABLE_AT,
    SlabHeader,
    committed,
    entries_in,
    keys_of,
)
from kvtier.slab.watch import SlabUpdate
from kvtier.types import BlockKey

logger = logging.getLogger(__name__)


def retaining(home: Path, tables: Iterable[Path]) -> set[Path]:
    """Those of a namespace's tables that name a block which engines retain, or people pinned."""
    kept = _kept(home)
    return {table for table in tables if not kept.isdisjoint(_keys(table))} if kept else set()


def _kept(home: Path) -> set[BlockKey]:
    """What lists say that cannot be read is no wish."""
    found: set[BlockKey] = set()
    now = time.time()
    for path in (*list_files(home), pins_path(home)):
        with contextlib.suppress(FormatError, OSError):
            for blocks in retention_list.read(path, bytes.fromhex(home.name)).values():
                found.update(key for key, until in blocks.items() if until > now)
    return found


def _keys(table: Path) -> list[BlockKey]:
    """What a table says is there; nothing, if it cannot be read."""
    with contextlib.suppress(OSError):
        entries = entries_in(read_part(table, 0, TABLE_BYTES_MAX))
        return keys_of(entries[committed(entries)])
    return []


_HOLD_S = 2.0
"""Others wait for the folder's lock meanwhile, ten seconds at most: what is left goes next time."""


class IdleHome(msgspec.Struct, frozen=True):
    """A namespace without a live owner."""

    path: Path
    tables: list[Path]
    """Those that may go: what is empty first, what holds something retained last, and of others
    the least recently used before."""
    used: float
    bytes: int


def reclaim(folder: SlabFolder, limits: FolderLimits, wanted: int) -> bool:
    """Under the folder's lock: remove slabs of idle namespaces until there is room for so much, or
    others have waited long enough; says whether anything was removed.

    Who was used within `limits.keep_s` keeps a fair share of the room.
    """
    used = used_bytes(folder.root)  # looked at once: thousands of slabs may have to go
    capacity = folder.bound(limits, used)
    idle, living = _others(folder.root, folder.home)
    now = time.time()  # which may have been ahead when they were used
    recent = {home.path: home.bytes for home in idle if abs(now - home.used) <= limits.keep_s}
    share = fair_share(capacity, list(recent.values()), 1 + living)
    removed, end = False, time.monotonic() + _HOLD_S
    for home in sorted(idle, key=lambda each: each.used):
        left = home.bytes
        for table in home.tables:
            enough = used <= capacity - wanted or (removed and time.monotonic() > end)
            if enough or (home.path in recent and left <= share):
                break
            size = _bytes(table)
            with contextlib.suppress(OSError):  # a folder of that name, say, must stop nothing else
                remove_slab(folder.disk, table)
                left -= size
                used -= size
                removed = True
        if not slab_files(home.path, TABLE_SUFFIX):
            remove_bare_home(home.path)
    return removed


def fair_share(capacity: int, idle: Sequence[int], living: int) -> int:
    """The most that any of them may have if who needs less leaves the rest to the others: idle
    ones need what they have, and living ones all they can get."""
    claims = living + len(idle)
    for size in sorted(idle):
        if size > capacity // claims:
            break
        capacity -= size
        claims -= 1
    return capacity // claims


def _bytes(table: Path) -> int:
    return length(table) + length(table.with_suffix(DATA_SUFFIX))


def _others(root: Path, mine: Path) -> tuple[list[IdleHome], int]:
    """The other namespaces that nobody serves, and how many somebody does."""
    idle: list[IdleHome] = []
    living = 0
    for path in homes(root):
        described = os.path.isfile(path / "namespace.json")  # noqa: PTH113 - never raises
        if path == mine or not described:
            continue
        if any(held(owner) for owner in marks(path)):
            living += 1
            continue
        tables = slab_files(path, TABLE_SUFFIX)
        used = {table: used_at(table) for table in tables}
        ours = [table for table in tables if not is_newer(table)]
        kept = retaining(path, ours)
        ours.sort(key=lambda table: (not is_empty(table), table in kept, used[table], table))
        size = sum(map(_bytes, tables))
        idle.append(IdleHome(path, ours, max(used.values(), default=0.0), size))
    return idle, living


def create_slab(
    folder: SlabFolder, owner: int, slots_max: int, limits: FolderLimits
) -> SlabFile | None:
    """A new empty slab within the budget and above the floor; None if there is no room."""
    with folder.locked():
        header = _plan_slab(folder, slots_max, limits)
        if header is None:
            return None
        making = _making(folder, header.slab_id, owner)
        try:
            folder.describe()
            fds = _begin(folder, making, header)
        except OSError as error:
            _give_up(folder, making, error)
            return None
    final = (folder.data_path(header.slab_id), folder.table_path(header.slab_id))
    try:
        _fill(folder, fds, header, owner)
        with folder.locked():
            for source, target in zip(making, final, strict=True):
                source.rename(target)
    except (OSError, FolderBusy) as error:
        _give_up(folder, (*making, *final), error)
        return None
    return SlabFile(header, owner)


def _plan_slab(folder: SlabFolder, slots_max: int, limits: FolderLimits) -> SlabHeader | None:
    """Under the lock: the largest slab that there is room for."""
    _sweep(folder)
    slots = _slots_at_most(folder, slots_max, limits)
    if slots < slots_max and reclaim(folder, limits, limits.slab_bytes):
        slots = _slots_at_most(folder, slots_max, limits)
    if slots < 1:
        return None
    return SlabHeader(
        slots=slots,
        slot_bytes=limits.slot_bytes,
        data_at=0,
        slab_id=_new_id(folder),
        namespace=folder.namespace.digest,
        flags=folder.flags | (FLAG_DISCARD if limits.discard else 0),
    )


def _slots_at_most(folder: SlabFolder, slots_max: int, limits: FolderLimits) -> int:
    used = used_bytes(folder.root)
    room = folder.bound(limits, used) - limits.slack - used
    fitting = max(0, room - TABLE_AT) // (limits.slot_bytes + ENTRY_BYTES)
    return min(slots_max, fitting, SLOTS_MAX)


def _making(folder: SlabFolder, slab_id: int, owner: int) -> tuple[Path, Path]:
    """Data and table of a slab that is not whole yet; the maker's mark lets others clean up."""
    stem = f"{slab_id:08x}.{owner:08x}"
    return folder.home / f"{stem}.data{MAKING_SUFFIX}", folder.home / f"{stem}.table{MAKING_SUFFIX}"


def _begin(folder: SlabFolder, making: tuple[Path, Path], header: SlabHeader) -> list[int]:
    """Under the lock: files of full length, which count against the budget at once."""
    fds: list[int] = []
    try:
        for path, size in zip(making, file_sizes(header), strict=True):
            fds.append(folder.make_file(path, size))
    except OSError:
        for fd in fds:
            folder.disk.close(fd)
        raise
    return fds


def _fill(folder: SlabFolder, fds: list[int], header: SlabHeader, owner: int) -> None:
    """Take the room, and write the header; others need not wait for that."""
    page = bytearray(header.pack().ljust(TABLE_AT, b"\0"))
    OWNER.pack_into(page, OWNER_AT, owner)
    try:
        for fd, size in zip(fds, file_sizes(header), strict=True):
            folder.take_room(fd, size)
        if folder.disk.writev(fds[1], [memoryview(page)], 0) != len(page):
            raise OSError(errno.EIO, "a slab's header was written in part")
    finally:
        for fd in fds:
            folder.disk.close(fd)


def _give_up(folder: SlabFolder, paths: Sequence[Path], error: OSError | FolderBusy) -> None:
    """Leave nothing of a slab that cannot be made; only the lack of room is no error."""
    for path in paths:
        folder.disk.unlink(path)
    if not isinstance(error, OSError) or error.errno not in NO_ROOM:
        raise error


def _new_id(folder: SlabFolder) -> int:
    while True:
        slab_id = secrets.randbits(32)
        if not folder.table_path(slab_id).exists() and not folder.data_path(slab_id).exists():
            return slab_id


def _sweep(folder: SlabFolder) -> None:
    """Under the lock: remove what the dead left half made, and their files."""
    for home in homes(folder.root):
        for path in marks(home):
            if not held(path):
                take_away(folder.disk, path)
        for path, maker in unfinished(home):
            if not held(maker):
                take_away(folder.disk, path)
        for path in halves(home):
            take_away(folder.disk, path)


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

    def __init__(self, folder: SlabFolder, limits: FolderLimits) -> None:
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
                word, capacity = _SAID.unpack(read_part(path, 0, SAID_BYTES))
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
    ) -> FolderLimits | None:
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
                if reclaim(folder, self._of_all(found), 0):
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
        others counts before they take it, too: else giving would go on until they do. With half a
        slab more, as whole slabs change hands: of fifteen slabs four engines get 4, 4, 4, 3."""
        used = used_bytes(self._folder.root)
        idle = [home for home in homes(self._folder.root) if not any(map(held, marks(home)))]
        room = self._folder.bound(self._of_all(found), used) - sum(map(used_bytes, idle))
        return max(0, room) // max(1, found.living) + self._limits.slab_bytes // 2

    def _of_all(self, found: Neighbours) -> FolderLimits:
        return msgspec.structs.replace(self._limits, capacity=found.capacity)


def _bytes_of(slabs: Sequence[SlabFile]) -> int:
    return sum(slab.header.data_end for slab in slabs)
