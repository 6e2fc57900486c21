"""The memory of slabs: where it is mapped, near which GPUs it lies, in what pages, and when it is
taken.

On a tmpfs the size of pages comes to a mapping that asks for it before there is any memory, and so
does the place: what `fallocate` takes comes as it comes, and stays so. A mount option decides on
huge pages there, not the system's setting for other shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.record.record import Buffer
from kvtier.slab.layout import ENTRY_BYTES, TABLE_AT, SlabHeader, entry_at, read_entries
from kvtier.system import memory as memory_limits
from kvtier.system.disk import mounted
from kvtier.system.memory import address_of, populate

logger = logging.getLogger(__name__)

_LARGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_AHEAD_BYTES = 16 << 20
"""So much is mapped by one call: whoever maps something else in this process waits meanwhile."""
_SHMEM_SWITCH = "sys/kernel/mm/transparent_hugepage/shmem_enabled"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _map(at: int | None, size: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    found = _libc.mmap(at, size, prot, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


class _Range:
    """Addresses that nothing is mapped at so far: they read as zeros, and take no memory. They are
    given back when the last view of them has gone."""

    def __init__(self, size: int) -> None:
        whole = size + _LARGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        begin = _map(None, whole, mmap.PROT_READ, flags)
        self.at = -(-begin // _LARGE_PAGE) * _LARGE_PAGE
        memory = (ctypes.c_ubyte * size).from_address(self.at)
        weakref.finalize(memory, _libc.munmap, begin, whole).atexit = False
        self.view: Buffer = memoryview(memory).cast("B")

    def place(self, offset: int, size: int, fd: int, file_offset: int, *, writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(self.at + offset, size, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, file_offset)

    def protect(self, offset: int, size: int, *, writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mprotect(self.at + offset, size, prot):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def clear(self, offset: int, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(self.at + offset, size, mmap.PROT_READ, flags)


def map_pages(memory: Sequence[Buffer]) -> None:
    """Map what lies in files already, so that whoever reads it first does not wait for its pages. A
    kernel before 5.14 leaves that to the reads."""
    for view in memory:
        begin, size = address_of(view), len(view)
        for at in range(0, size, _AHEAD_BYTES):
            _libc.madvise(begin + at, min(_AHEAD_BYTES, size - at), _MADV_POPULATE_READ)


class Arena:
    """One array of slots, and one of their entries, in which each slab of an engine has a range of
    numbers: whoever knows a slot's number reaches it, whatever slab it is of. Numbers that no slab
    has read as zeros: as entries that are free."""

    def __init__(self, slots: int, slot_bytes: int, heads: int) -> None:
        """For so many slots, in at most so many slabs."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._data = _Range(slots * slot_bytes)
        self._table = _Range(entry_at(slots))
        self._heads = _Range(heads * TABLE_AT)
        self.data = self._data.view
        self.table = self._table.view
        """As a slab's, but for the header page, which is empty."""
        self.heads = self._heads.view
        """The header pages of slabs."""

    def map(
        self, base: int, header: SlabHeader, fds: tuple[int, int], head: int, *, writable: bool
    ) -> None:
        """Let a slab's slots have the numbers from `base` on, and its header page that place among
        `heads`; raises OSError. `fds` are its data and its table, whose lengths have been looked
        at."""
        data, table = fds
        self._heads.place(head * TABLE_AT, TABLE_AT, table, 0, writable=writable)
        size = header.slots * header.slot_bytes
        self._data.place(base * self.slot_bytes, size, data, header.data_at, writable=writable)
        size = header.slots * ENTRY_BYTES
        self._table.place(entry_at(base), size, table, TABLE_AT, writable=writable)

    def protect(self, base: int, slots: int, head: int, *, writable: bool) -> None:
        """Say whether a slab that is mapped may be written to from here; raises OSError."""
        self._heads.protect(head * TABLE_AT, TABLE_AT, writable=writable)
        self._data.protect(base * self.slot_bytes, slots * self.slot_bytes, writable=writable)
        self._table.protect(entry_at(base), _pages(slots * ENTRY_BYTES), writable=writable)

    def unmap(self, base: int, slots: int, head: int) -> None:
        """Let no slab have these numbers any more; raises OSError."""
        self._heads.clear(head * TABLE_AT, TABLE_AT)
        self._data.clear(base * self.slot_bytes, slots * self.slot_bytes)
        self._table.clear(entry_at(base), _pages(slots * ENTRY_BYTES))

    def entries(self) -> npt.NDArray[np.void]:
        """All entries, in place."""
        return read_entries(self.table, self.slots)

    def close(self) -> None:
        """Whoever still holds a view of a record keeps the mappings alive until it drops."""
        for view in (self.data, self.table, self.heads):
            view.release()


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def slots_aligned(slot_bytes: int) -> int:
    """Of how many slots the ranges of numbers are multiples, so that tables begin with a page and
    slots with a large one."""
    entries = mmap.PAGESIZE // ENTRY_BYTES
    return math.lcm(entries, _LARGE_PAGE // math.gcd(slot_bytes, _LARGE_PAGE))


# -- what new memory is like -----------------------------------------------------------------


class NewMemory:
    """Shapes files that have no memory yet."""

    def __init__(self, path: Path, near: Sequence[int], *, huge_pages: bool, serving: bool) -> None:
        self._path = path
        self._near = near
        self._huge_pages = huge_pages
        self._serving = serving

    def shape(self, fd: int, size: int) -> None:
        """Choose, and take what is to be there at once. What this does not take is taken, or
        refused, by the allocation that must follow."""
        if not (self._near or self._huge_pages or self._serving):
            return
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as mapping, memoryview(mapping) as view:
            if self._near:
                self._place(view)
            if self._huge_pages:
                with contextlib.suppress(OSError):
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            if self._huge_pages or self._serving:
                topology = memory_limits.Topology()
                cores = {core for node in self._near for core in topology.cores(node)}
                populate(view, f"taking CPU memory in {self._path}", cores)

    def _place(self, view: Buffer) -> None:
        """Choose the nodes that it will come from."""
        reason = memory_limits.place(view, self._near)
        where = f"{memory_limits.describe(self._near)}, beside the GPUs"
        if reason is None:
            logger.info("CPU memory in %s lies on NUMA %s", self._path, where)
        else:
            logger.warning(
                "CPU memory in %s cannot be put on NUMA %s: %s", self._path, where, reason
            )


def no_huge_pages(folder: Path, root: Path = Path("/")) -> str | None:
    """Why files in this folder get no huge pages; None if they may get some."""
    try:
        switch = (root / _SHMEM_SWITCH).read_text()
    except OSError:
        return "this kernel knows none for shared memory"
    if "[force]" in switch:
        return None
    if "[deny]" in switch:
        return f"/{_SHMEM_SWITCH} is deny: set it to never or advise"
    kind, options = mounted(folder, root)
    if kind != "tmpfs":
        return f"{folder} is not on a tmpfs"
    given = {option.removeprefix("huge=") for option in options if option.startswith("huge=")}
    if given <= {"never"}:
        return f"mount its tmpfs with huge=advise (mount -o remount,huge=advise {folder})"
    return None


# -- memory that is taken before its slabs are made ------------------------------------------

_lock = threading.Lock()
_begun: dict[Path, MemoryAhead] = {}
"""By folder."""


class MemoryAhead:
    """Files without a name, and the thread that takes their memory.

    A worker knows where slabs will be and how large before the scheduler knows what they will hold;
    in between the engine warms up for seconds. If nobody comes for the files, or the process dies,
    the memory is free again.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], memory: NewMemory) -> None:
        self._memory = memory
        self._files: list[tuple[int, int]] = []
        """Descriptors and sizes, those first that are taken first."""
        self._taken = threading.Condition()
        self._unwanted = False
        try:
            for size in sizes:
                fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                self._files.append((fd, size))
            self._left = len(sizes)
            threading.Thread(target=self._take, name="kvtier-memory", daemon=True).start()
        except (OSError, RuntimeError):  # the system gives no more files, or threads
            self._left = 0  # nobody takes anything
            self.close()
            raise

    def _take(self) -> None:
        for fd, size in list(self._files):
            if not self._unwanted:
                with contextlib.suppress(OSError, ValueError):
                    self._memory.shape(fd, size)
            with self._taken:
                self._left -= 1
                self._taken.notify_all()

    def claim(self, path: Path, size: int) -> int | None:
        """A file of this size under this name, whose memory is there; None if there is none."""
        while self._files:
            fd, most = self._files.pop(0)
            with self._taken:
                self._taken.wait_for(lambda: self._left <= len(self._files))
            try:
                if size <= most <= os.fstat(fd).st_size:
                    os.ftruncate(fd, size)
                    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)  # else it is not followed
                    return fd
            except OSError as error:
                logger.debug("memory that was taken beforehand cannot be used: %s", error)
            os.close(fd)
        return None

    @property
    def bytes(self) -> int:
        """What is taken by now, and not claimed."""
        return sum(os.fstat(fd).st_blocks * 512 for fd, _ in self._files)

    def close(self) -> None:
        """Nobody comes for what is left."""
        self._unwanted = True
        with self._taken:
            self._taken.wait_for(lambda: self._left <= 0)
        while self._files:
            os.close(self._files.pop()[0])


def begin_ahead(folder: Path, sizes: Sequence[int], memory: NewMemory) -> None:
    """Take memory for slabs on this file system, if there is room for it."""
    left = memory_limits.memory_left() if memory_limits.in_memory(folder) else None
    if left is None or sum(sizes) > left:
        return
    with _lock:
        if folder not in _begun:
            with contextlib.suppress(OSError, RuntimeError):
                _begun[folder] = MemoryAhead(folder, sizes, memory)


def claim_ahead(folder: Path, path: Path, size: int) -> int | None:
    """As `MemoryAhead.claim`, of what was begun in this folder."""
    with _lock:
        begun = _begun.get(folder)
    return begun.claim(path, size) if begun is not None else None


def taken_ahead(folder: Path) -> int:
    """How much memory was begun to be taken in this folder."""
    with _lock:
        begun = _begun.get(folder)
    return begun.bytes if begun is not None else 0


def drop_ahead(folder: Path) -> None:
    """Nobody comes for the rest."""
    with _lock:
        begun = _begun.pop(folder, None)
    if begun is not None:
        begun.close()
