"""A region with its owner's lock held."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.backends.cpu import early_memory
from kvtier.backends.cpu.leftover_regions import said_of_idle
from kvtier.backends.cpu.region import MAKING_SUFFIX, Region, read_header
from kvtier.backends.cpu.region_locks import OPEN_FLAGS, list_path, lock_owner, owner_path, unlock
from kvtier.backends.cpu.region_memory import Memory
from kvtier.errors import FormatError, MediumError
from kvtier.slab.layout import SlabHeader
from kvtier.system import memory as memory_limits
from kvtier.system.disk import Disk, lock_within

logger = logging.getLogger(__name__)

_DYING_S = 5.0
"""How long a new owner waits for processes of a killed engine to disappear."""


class OwnedRegion:
    """A region with the owner's lock held: found as it was left, or made anew."""

    def __init__(
        self,
        path: Path,
        wanted: SlabHeader,
        disk: Disk,
        near: Sequence[int] = (),
        *,
        huge_pages: bool = False,
        serving: bool = False,
    ) -> None:
        self.path = path
        self._disk = disk
        self._memory = Memory(path, near, huge_pages=huge_pages, serving=serving)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_owner(path)
        except OSError as error:
            raise MediumError(
                f"cannot make a CPU region in {path.parent} ({error.strerror}): "
                "set the cpu tier's path to a folder on tmpfs where you may write"
            ) from error
        try:
            self.region = self._open(wanted)
        except BaseException:
            if not path.exists():
                owner_path(path).unlink(missing_ok=True)
            unlock(self._lock)
            raise

    def _open(self, wanted: SlabHeader) -> Region:
        if self.path.exists():
            reason = self._unusable(wanted)
            if reason is None:
                region = Region.attach(self.path)
                if region.header.flags != wanted.flags:
                    region.set_flags(wanted.flags)
                return region
            logger.warning("CPU region %s is made anew: %s", self.path, reason)
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                raise MediumError(
                    f"cannot make the CPU region {self.path} anew ({error.strerror}): remove it, "
                    "or give the cpu tier another name"
                ) from error
        return self._create(wanted)

    def _unusable(self, wanted: SlabHeader) -> str | None:
        """Why the region that is there cannot be taken over; None if it can."""
        try:
            fd = os.open(self.path, OPEN_FLAGS)
        except OSError as error:
            return f"it cannot be opened ({error.strerror})"
        try:
            if os.fstat(fd).st_uid != os.getuid():  # who could change it under our hands
                return "it belongs to another user"
            if not lock_within(fd, fcntl.LOCK_EX, _DYING_S):
                return "processes of an earlier engine still write to it"
            found = read_header(fd)
        except (FormatError, OSError) as error:
            return str(error)
        finally:
            os.close(fd)
        if found.namespace != wanted.namespace:
            return "it belongs to another namespace (model, layout or version)"
        if (found.slots, found.slot_bytes) != (wanted.slots, wanted.slot_bytes):
            return "its capacity has changed"
        return None

    def _create(self, header: SlabHeader) -> Region:
        size, making = header.data_end, self.path.with_suffix(MAKING_SUFFIX)
        try:
            self._disk.unlink(making)
            fd = early_memory.claim(making, size)
            if fd is None:
                self._check_room(size)
                fd = self._disk.open(making, create=True)
            try:
                if os.fstat(fd).st_size == 0:
                    self._memory.shape(fd, size)
                self._disk.allocate(fd, size)
                os.pwrite(fd, header.pack(), 0)
            finally:
                self._disk.close(fd)
            making.rename(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._disk.unlink(making)
            free = self._disk.free_bytes(self.path.parent)
            raise MediumError(
                f"cannot make a CPU region of {size} bytes in {self.path.parent} "
                f"({error.strerror}; {free} bytes are free there): lower the cpu tier's capacity, "
                "or give shared memory more room (in containers: --shm-size)"
                + said_of_idle(self.path.parent, [self.path])
            ) from error
        return Region.attach(self.path)

    def _check_room(self, size: int) -> None:
        left = memory_limits.memory_left() if memory_limits.in_memory(self.path.parent) else None
        if left is not None and size > left:  # the system would not refuse, but kill somebody
            raise MediumError(
                f"a CPU region of {size} bytes does not fit into memory, of which {left} bytes are "
                "free (on this machine, or below its container's limit): lower the cpu tier's "
                "capacity, raise the limit, or remove regions that nobody uses (kvtier gc)"
                + said_of_idle(self.path.parent, [self.path])
            )

    def note_use(self) -> None:
        """Say by the file's time that it is in use: writing through a mapping does not."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def close(self, *, remove: bool) -> None:
        """Give the region up; its blocks stay for the next owner unless it is removed."""
        if remove:
            self.path.unlink(missing_ok=True)
            list_path(self.path).unlink(missing_ok=True)
        else:
            self.note_use()
        self.region.close()
        if remove:
            owner_path(self.path).unlink(missing_ok=True)
        unlock(self._lock)
