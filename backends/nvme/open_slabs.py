"""The slabs that a handler has open, and the owners that it acts for: a bounded number of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvtier.backends.nvme.folder.files import (
    DATA_SUFFIX,
    TABLE_SUFFIX,
    hold_owner,
    let_go,
    owner_path,
)
from kvtier.backends.nvme.folder.lock import has_name
from kvtier.core.slab import layout
from kvtier.errors import FormatError
from kvtier.system.disk import Disk

logger = logging.getLogger(__name__)

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
