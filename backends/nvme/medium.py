"""The data side of an NVMe folder: records by direct I/O, entries of the table around them.

Neighbouring slots are moved by one system call. A store writes the entry as RESERVED, then the
record, then the entry as VALID: a process that dies in between leaves a slot that counts as free.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from kvtier.errors import FormatError
from kvtier.interfaces.handler import Handler, own_spec
from kvtier.record.record import Buffer, record_bytes
from kvtier.slab import layout
from kvtier.slab.files import DATA_SUFFIX, TABLE_SUFFIX, has_name, hold_owner, let_go, owner_path
from kvtier.slab.layout import SLOT_BITS, SLOT_MASK
from kvtier.system.disk import Disk, read_all, write_all
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome

logger = logging.getLogger(__name__)


class NvmeSpec(LoadStoreSpec, tag="nvme"):
    """Places as `slab id << 24 | slot`, and who acts (a handler writes only for a live owner)."""

    medium: ClassVar[str] = "nvme"
    places: list[int]
    owner: int

    def __len__(self) -> int:
        return len(self.places)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.places[start:stop], self.owner)

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        owner = pieces[0].owner if pieces else 0
        return cls([place for piece in pieces for place in piece.places], owner)


T = TypeVar("T")

_OPEN_SLABS_MAX = 256
_LOOKED_AT = 8
"""With each slab that is opened so many others are looked at, whether they are there yet."""
_NO_FILES = (errno.EMFILE, errno.ENFILE)


class OpenSlab:
    """A slab's two files, open."""

    def __init__(
        self,
        home: Path,
        slab_id: int,
        disk: Disk,
        namespace: bytes,
        direct: bool,
        only_read: bool,
    ) -> None:
        self._disk = disk
        self._only_read = only_read
        self.direct = direct
        self.users = 0
        self.retired = False
        """Closed when its last user is done."""
        self.named = False
        """Whether its name is known to survive a loss of power."""
        self.table_fd = self._open(home / f"{slab_id:08x}{TABLE_SUFFIX}")
        try:
            page = bytearray(layout.TABLE_AT)
            disk.readv(self.table_fd, [memoryview(page)], 0)
            header = layout.SlabHeader.unpack(memoryview(page))
            if header.namespace != namespace or header.slab_id != slab_id:
                raise FormatError("the slab belongs to another namespace")
            self.slots, self.slot_bytes = header.slots, header.slot_bytes
            self.data_fd = self._open_data(home / f"{slab_id:08x}{DATA_SUFFIX}")
        except (FormatError, OSError):
            disk.close(self.table_fd)
            raise

    def _open_data(self, path: Path) -> int:
        if self.direct:
            try:
                return self._open(path, direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return self._open(path)

    def _open(self, path: Path, *, direct: bool = False) -> int:
        if not self._only_read:
            return self._disk.open(path, direct=direct)
        fd = self._disk.open_to_read(path)
        if direct:
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
            except OSError:
                self._disk.close(fd)
                raise
        return fd

    def deleted(self) -> bool:
        """Whether the slab has been retired since it was opened."""
        return os.fstat(self.table_fd).st_nlink == 0

    def close(self) -> None:
        self._disk.close(self.data_fd)
        self._disk.close(self.table_fd)


class OpenSlabs:
    """Opens slabs when they are first used, and closes those that were not used for longest.

    Loads wait for the lock of the slabs: no file is opened, closed or looked at under it, because a
    disk may take its time. Only stores wait for that of the owners.
    """

    def __init__(
        self, home: Path, namespace: bytes, disk: Disk, *, direct: bool, only_read: bool
    ) -> None:
        self._home = home
        self._digest = namespace
        self._disk = disk
        self._direct = direct
        self._only_read = only_read
        self._lock = threading.Lock()
        self._slabs: OrderedDict[int, OpenSlab] = OrderedDict()
        self._unlooked: list[int] = []
        """Slabs that may have been removed since they were opened."""
        self._folders = 0
        """How often the folder was found to be another one."""
        self._owners_lock = threading.Lock()
        self._owners: dict[int, int] = {}
        self._unheld: int | None = None

    def borrow(self, slab_id: int) -> OpenSlab:
        """A slab, open until `give_back`; raises FormatError or OSError."""
        while True:
            with self._lock:
                folder = self._folders
                if slab_id in self._slabs:
                    return self._lend(slab_id)
            how = self._disk, self._digest, self._direct, self._only_read
            opened = self._opened(partial(OpenSlab, self._home, slab_id, *how))
            if self._direct and not opened.direct:
                self._say_buffered()
            self._drop_deleted()
            with self._lock:
                if folder == self._folders and slab_id not in self._slabs:
                    self._slabs[slab_id] = opened
                    slab = self._lend(slab_id)
                    surplus = len(self._slabs) - _OPEN_SLABS_MAX
                    unused = [self._slabs.popitem(last=False)[1] for _ in range(surplus)]
                    break
            opened.close()  # another thread was faster, or it is of a folder that is gone
        self._retire(unused)
        return slab

    def _lend(self, slab_id: int) -> OpenSlab:
        """Under the lock."""
        self._slabs.move_to_end(slab_id)
        slab = self._slabs[slab_id]
        slab.users += 1
        return slab

    def _opened(self, opening: Callable[[], T]) -> T:
        """Where there may be no more files, at the cost of slabs that were not used for longest."""
        while True:
            try:
                return opening()
            except OSError as error:
                with self._lock:
                    if error.errno not in _NO_FILES or not self._slabs:
                        raise
                    unused = self._slabs.popitem(last=False)[1]
                self._retire([unused])

    def _drop_deleted(self) -> None:
        """Not all are looked at each time: in a folder of many slabs most loads open one."""
        with self._lock:
            self._unlooked = self._unlooked or list(self._slabs)
            some = [each for each in self._unlooked[:_LOOKED_AT] if each in self._slabs]
            del self._unlooked[:_LOOKED_AT]
            looked_at = {each: self._slabs[each] for each in some}
            for slab in looked_at.values():
                slab.users += 1
        for slab_id, slab in looked_at.items():
            with contextlib.suppress(OSError):  # of what cannot be looked at nobody knows
                if slab.deleted():
                    with self._lock:
                        if self._slabs.get(slab_id) is slab:
                            del self._slabs[slab_id]
                        slab.retired = True
            self.give_back(slab)

    def _retire(self, slabs: Sequence[OpenSlab]) -> None:
        """Close these, which are not among the slabs any more, when their last users are done."""
        with self._lock:
            for slab in slabs:
                slab.retired = True
            unused = [slab for slab in slabs if not slab.users]
        for slab in unused:
            slab.close()

    def give_back(self, slab: OpenSlab) -> None:
        with self._lock:
            slab.users -= 1
            unused = slab.retired and not slab.users
        if unused:
            slab.close()

    def refuse_direct(self, slab_id: int) -> None:
        """The file system took O_DIRECT at open but not at use: go on through the page cache."""
        if self._direct:
            self._say_buffered()
        with self._lock:
            slab = self._slabs.pop(slab_id, None)
        if slab is not None:
            self._retire([slab])

    def _say_buffered(self) -> None:
        with self._lock:
            said, self._direct = not self._direct, False
        if not said:
            logger.warning(
                "%s refuses direct I/O: reading and writing through the page cache", self._home
            )

    def acts_for(self, owner: int) -> bool:
        """Hold the mark of an owner, so that its slots may be written; False if that fails."""
        with self._owners_lock:
            self._stop_acting()
            if owner not in self._owners:
                owners = self._home / "owners"
                try:
                    self._owners[owner] = self._opened(lambda: hold_owner(owners, owner))
                except OSError as error:
                    if owner != self._unheld:  # said once, though asked for with every store
                        logger.warning(
                            "cannot act for who owns these slots (%s): not stored", error
                        )
                    self._unheld = owner
                    return False
            return True

    def _stop_acting(self) -> None:
        """For owners whose mark was taken away, be it with the whole folder, which may come back:
        their slabs may be another's by now, and for each there would be a descriptor for ever. Of a
        folder that came back as a copy, what is open belongs to the one that is gone."""
        for owner, fd in list(self._owners.items()):
            with contextlib.suppress(OSError):  # of what cannot be looked at nobody knows
                if not has_name(fd, owner_path(self._home / "owners", owner)):
                    os.close(self._owners.pop(owner))
                    with self._lock:
                        self._folders += 1
                        gone, self._slabs = list(self._slabs.values()), OrderedDict()
                    self._retire(gone)

    def close(self) -> None:
        """Close all files and release all owners."""
        with self._lock:
            slabs, self._slabs = list(self._slabs.values()), OrderedDict()
        for slab in slabs:
            slab.close()
        with self._owners_lock:
            for owner, fd in self._owners.items():
                let_go(self._home / "owners", owner, fd)
            self._owners.clear()


_CALL_BYTES = 4 << 20
"""Of payload. A direct read of 1 MiB costs 1.6 times the processor time of a quarter of this."""
_SLOWEST = 4 << 20
"""Bytes a second: one thread of several gets as many even of a slow disk that engines share."""
_TRIES_SHARE = 0.5
"""The part of `call_seconds` after whose end nothing more is tried in a call in which something has
failed: the rest is for the try that is under way then."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_SYNC = (errno.EINVAL, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)
"""Of a folder: the file system knows no such thing, or it is somebody else's."""


class NvmeHandler(Handler):
    """Reads and writes the slots of one namespace's slabs; shared by the mover's threads."""

    def __init__(
        self,
        root: Path,
        namespace: Namespace,
        *,
        threads: int,
        direct: bool,
        power_safe: bool,
        only_read: bool = False,
        disk: Disk | None = None,
    ) -> None:
        self.concurrency = threads
        record = record_bytes(namespace.payload_bytes)
        self.batch_blocks = max(1, min(64, _CALL_BYTES // namespace.payload_bytes))
        self.call_seconds = max(Handler.call_seconds, self.batch_blocks * record / _SLOWEST)
        self._home = root / namespace.id
        self._namespace = namespace
        self._power_safe = power_safe
        self._disk = disk or Disk()
        self._slabs = OpenSlabs(
            self._home, namespace.digest, self._disk, direct=direct, only_read=only_read
        )

    # -- moving ----------------------------------------------------------------------------

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        return self._each_run(own_spec(spec, NvmeSpec).places, keys, into, self._load_run)

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        own = own_spec(spec, NvmeSpec)
        if not self._slabs.acts_for(own.owner):
            return [Outcome.DROPPED] * len(own)
        outcomes = self._each_run(own.places, keys, records, self._store_run)
        # A slab that is gone is the target's trouble: GONE would speak of the record to store.
        return [Outcome.DROPPED if each is Outcome.GONE else each for each in outcomes]

    def _each_run(
        self,
        places: Sequence[int],
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        move: Callable[[OpenSlab, int, Sequence[BlockKey], Sequence[Buffer]], Outcome],
    ) -> list[Outcome]:
        """Move run by run, and find out which blocks of a run that fails it was. A disk may take
        seconds for each error: what there is no time for is TIMEOUT."""
        outcomes = [Outcome.TIMEOUT] * len(places)
        until, failed = time.monotonic() + _TRIES_SHARE * self.call_seconds, False
        tries = deque(layout.runs(places))
        while tries and not (failed and time.monotonic() >= until):
            start, stop = tries.popleft()
            outcome = self._run(places[start], keys[start:stop], buffers[start:stop], move)
            failed |= not outcome.ok
            if outcome.ok or stop - start == 1:
                outcomes[start:stop] = [outcome] * (stop - start)
            else:
                tries.extendleft((at, at + 1) for at in reversed(range(start, stop)))
        return outcomes

    def _run(
        self,
        place: int,
        keys: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        move: Callable[[OpenSlab, int, Sequence[BlockKey], Sequence[Buffer]], Outcome],
    ) -> Outcome:
        try:
            slab = self._slabs.borrow(place >> SLOT_BITS)
        except FileNotFoundError:
            return Outcome.GONE
        except (FormatError, OSError) as error:
            logger.debug("slab %08x cannot be opened: %s", place >> SLOT_BITS, error)
            return Outcome.IO_ERROR
        try:
            slot = place & SLOT_MASK
            if slot + len(keys) > slab.slots:
                return Outcome.GONE
            return move(slab, slot, keys, buffers)
        except OSError as error:
            refused = error.errno == errno.EINVAL and slab.direct
            if not refused:
                return Outcome.NO_SPACE if error.errno in _NO_SPACE else Outcome.IO_ERROR
        finally:
            self._slabs.give_back(slab)
        self._slabs.refuse_direct(place >> SLOT_BITS)
        return self._run(place, keys, buffers, move)

    def _load_run(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> Outcome:
        for at, buffers in self._pieces(slab, slot, keys, into):
            if read_all(self._disk, slab.data_fd, buffers, at) != sum(map(len, buffers)):
                return Outcome.GONE
        return Outcome.OK

    def _store_run(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> Outcome:
        self._write_entries(slab, slot, keys, layout.RESERVED)
        for at, buffers in self._pieces(slab, slot, keys, records):
            write_all(self._disk, slab.data_fd, buffers, at)
        if self._power_safe:
            self._disk.sync(slab.data_fd)
        self._write_entries(slab, slot, keys, layout.VALID)
        if self._power_safe:
            self._disk.sync(slab.table_fd)
            self._sync_names(slab)
        return Outcome.OK

    def _sync_names(self, slab: OpenSlab) -> None:
        """Of the slab, and of the folders above that were made for it."""
        if slab.named:
            return
        for folder in (self._home, self._home.parent, self._home.parent.parent):
            try:
                self._disk.sync_names(folder)
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise
        slab.named = True

    def _write_entries(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], state: int
    ) -> None:
        entries = layout.pack_entries(state, keys, 0, int(time.time()))
        write_all(self._disk, slab.table_fd, [memoryview(entries)], layout.entry_at(slot))

    def _pieces(
        self, slab: OpenSlab, slot: int, keys: Sequence[BlockKey], buffers: Sequence[Buffer]
    ) -> list[tuple[int, list[Buffer]]]:
        """What one system call each can move: the whole run if its records fill their slots."""
        size = slab.slot_bytes
        lengths = [record_bytes(self._namespace.payload_of(key)) for key in keys]
        cut = [buffer[:length] for buffer, length in zip(buffers, lengths, strict=True)]
        if all(length == size for length in lengths[:-1]):
            return [(slot * size, cut)]
        return [((slot + index) * size, [buffer]) for index, buffer in enumerate(cut)]

    def close(self) -> None:
        self._slabs.close()
