"""How much memory this machine or container has left, taking it page by page, and NUMA nodes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.record.record import Buffer
from kvtier.system.calls import Attempt
from kvtier.system.disk import mounted

_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of a control group, in the second version and in the first: its limit, what is used of it, and
how the figures begin that count what lies below it, too."""
_SWAP = ("memory.swap.max", "memory.swap.current")
_BOTH = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", "total_")
"""Of the swap, in the second version; in the first, of memory and swap together."""
_HELD = ("AnonPages", "Shmem", "SUnreclaim", "PageTables", "KernelStack", "Hugetlb")
"""What nobody gives back. The system's own estimate of what is available does not know of some file
systems' caches (ZFS): a region that fits must not be refused."""
_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")
"""What the kernel takes back if it must: copies of what lies on disks, and of its names."""


def in_memory(folder: Path) -> bool:
    """Whether what lies in this folder is memory."""
    return mounted(folder)[0] in ("tmpfs", "ramfs")


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take, of the machine and of every control group that it is
    in; None if the system does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        figures = {name: int(rest.split()[0]) << 10 for name, _, rest in _split(lines, ":")}
        swap = figures.get("SwapFree", 0)
        left = figures["MemTotal"] - sum(figures.get(name, 0) for name in _HELD)
    except (OSError, ValueError, IndexError, KeyError):
        return None
    both = left + swap
    for group in _groups(root):
        for files in _FILES:
            with contextlib.suppress(OSError, ValueError, KeyError):
                left = min(left, _left_of(group, *files))
        with contextlib.suppress(OSError, ValueError):
            most, used = [int((group / name).read_text()) for name in _SWAP]
            swap = min(swap, most - used)
        with contextlib.suppress(OSError, ValueError):
            both = min(both, _left_of(group, *_BOTH))
    return max(0, min(both, max(0, left) + max(0, swap)))


def memory_given(root: Path = Path("/")) -> int:
    """Bytes that this process may use at all: the machine's memory, or less in a container."""
    given = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups(root):
        for limit, _, _ in _FILES:
            with contextlib.suppress(OSError, ValueError):
                given = min(given, int((group / limit).read_text()))
    return given


def _left_of(group: Path, limit: str, current: str, prefix: str) -> int:
    """Raises ValueError where there is no limit."""
    most = int((group / limit).read_text())
    lines = (group / "memory.stat").read_text().splitlines()
    figures = {name: int(figure) for name, _, figure in _split(lines, " ")}
    given_back = sum(figures.get(prefix + name, 0) for name in _GIVEN_BACK)
    return most - int((group / current).read_text()) + given_back


def _groups(root: Path) -> Iterator[Path]:
    """The control groups that may limit this process's memory, those above them included. In a
    container the path may be one of outside, but then the mount itself is its group."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, managed, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if managed and "memory" not in managed.split(","):
            continue
        mount = base / "memory" if managed else base
        inner = mount / path.strip("/")
        yield inner
        yield from (each for each in inner.parents if each.is_relative_to(mount))


def _split(lines: list[str], at: str) -> Iterator[tuple[str, str, str]]:
    return (line.partition(at) for line in lines)


# Memory that is taken before it is used, by several threads at once.
#
# What is touched for the first time is found, cleared and mapped by the kernel, page by page: some
# 2 GB/s by one thread, in the middle of whatever touches it. All of it happens outside Python's
# lock.

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14: take all of the memory now, and fail where none is left."""
_THREADS = 8
"""More of them wait for each other in the kernel."""
_SLICE_BYTES = 64 << 20
SAY_EVERY_S = 3.0
GIB = 1 << 30


def address_of(memory: Buffer) -> int:
    """Where it begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def system_takes(address: int, size: int) -> bool:
    """Let the system take and map a range now; false if it does not."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return not call(address, size, _POPULATE_WRITE)


class Populating:
    """Takes ranges of addresses, in their order."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        cores: Collection[int] = (),
        take: Callable[[int, int], bool] = system_takes,
        threads: int | None = None,
    ) -> None:
        self._ranges = ranges
        self._cores = cores
        self._take = take
        self._changed = threading.Condition()
        self._next = 0
        self._done = [False] * len(ranges)
        self.whole = True
        """Whether the system has taken all so far."""
        count = threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self._threads = [
            threading.Thread(target=self._run_near, name="kvtier-populate", daemon=True)
            for _ in range(min(count, len(ranges)))
        ]
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                self._threads = self._threads[:started]
                break
        if not self._threads:
            self._run()

    def _run_near(self) -> None:
        with Attempt("memory cannot be taken before it is used"):
            bind_thread(self._cores)
            self._run()
            return
        with self._changed:  # whoever waits for it must not wait for ever
            self.whole = False
            self._end()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                at = self._next
                if at >= len(self._ranges):
                    return
                self._next += 1
            taken = self._take(*self._ranges[at])
            with self._changed:
                self.whole = self.whole and taken
                self._done[at] = True
                if not taken:  # nor will it take the others
                    self._end()
                self._changed.notify_all()

    def _end(self) -> None:
        self._next = len(self._ranges)

    def wait(self, index: int, seconds: float | None = None) -> bool:
        """Whether a range is there, or will not be."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done[index] or not self.whole, seconds)

    def stop(self) -> None:
        """Return when nothing is being taken any more."""
        with self._changed:
            self._end()
        for thread in self._threads:
            thread.join()


def populate(memory: Buffer, what: str, cores: Collection[int] = ()) -> bool:
    """Take all of a mapping's memory; whether the system did. The log says how far it has come."""
    first, size = address_of(memory), len(memory)
    cuts = range(0, size, _SLICE_BYTES)
    ranges = [(first + at, min(_SLICE_BYTES, size - at)) for at in cuts]
    began = time.monotonic()
    populating = Populating(ranges, cores)
    try:
        for index, (address, _) in enumerate(ranges):
            while not populating.wait(index, SAY_EVERY_S):
                logger.info("%s: %.1f of %.1f GiB", what, (address - first) / GIB, size / GIB)
    finally:
        populating.stop()
    seconds = time.monotonic() - began
    if populating.whole and seconds > 1.0:
        logger.info("%s: %.1f GiB in %.1f s", what, size / GIB, seconds)
    return populating.whole


# -- NUMA nodes ------------------------------------------------------------------------------------


_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED, _INTERLEAVE = 1, 3
_NODES_MAX = 1024


class _Gpu(NamedTuple):
    node: int | None
    uuid: str


class Topology:
    """The nodes of a machine, and what is near them."""

    def __init__(
        self,
        sys: Path = Path("/sys"),
        driver: Path = Path("/proc/driver/nvidia"),
        dev: Path = Path("/dev"),
    ) -> None:
        self._sys = sys
        self._driver = driver
        self._dev = dev
        self.nodes: list[int] = _numbers(_read(sys / "devices/system/node/online"))

    def cores(self, node: int | None) -> set[int]:
        """The cores of a node; empty if there is nothing to choose."""
        if node is None or len(self.nodes) < 2:
            return set()
        return set(_numbers(_read(self._sys / f"devices/system/node/node{node}/cpulist")))

    def node_of(self, pci: str) -> int | None:
        """The node that a PCI device (like "0000:3b:00.0") is at, if it says so."""
        text = _read(self._sys / "bus/pci/devices" / pci.lower() / "numa_node")
        return int(text) if text.isdecimal() else None

    def gpus(self) -> list[int | None]:
        """The nodes of the NVIDIA GPUs that there are here, in the order of their addresses."""
        return [gpu.node for gpu in self._gpus()]

    def near(self, first: int, count: int, environment: Mapping[str, str]) -> tuple[int, ...]:
        """The nodes of the engine's GPUs: `count` of the visible ones, from the `first` on.

        Empty if there is nothing to choose. GPUs are numbered by address here, which is how CUDA
        does it where they are all of one kind.
        """
        gpus = self._gpus()
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        names = [name for each in visible.split(",") if (name := each.strip())]
        chosen = [
            gpu
            for name in names
            for number, gpu in enumerate(gpus)
            if name == str(number) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if len(chosen) == len(names):
            gpus = chosen or gpus
        if len(self.nodes) < 2 or not gpus:
            return ()
        mine = {gpus[(first + rank) % len(gpus)].node for rank in range(count)}
        return tuple(sorted(node for node in mine if node is not None))

    def _gpus(self) -> list[_Gpu]:
        """In a container /sys has those of the whole machine. Of one that was not given to it the
        driver says nothing there, or at least its device file is missing. (Where all are missing,
        nobody may have used the driver yet.)"""
        all_gpus, given = [], []
        for path in sorted(filter(_is_gpu, (self._sys / "bus/pci/devices").glob("*"))):
            said = _facts(_read(self._driver / "gpus" / path.name / "information"))
            all_gpus.append(_Gpu(self.node_of(path.name), said.get("GPU UUID", "")))
            if (self._dev / f"nvidia{said.get('Device Minor')}").exists():
                given.append(all_gpus[-1])
        return given or all_gpus


def place(memory: Buffer, nodes: Collection[int]) -> str | None:
    """Let shared memory that is not there yet come from these nodes: from one as far as it has
    room, from several in turn. Returns the reason if the system refuses."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"unknown for {platform.machine()}"
    words = (ctypes.c_ulong * (_NODES_MAX // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    failed = call(
        ctypes.c_long(number),
        ctypes.c_void_p(address_of(memory)),
        ctypes.c_ulong(len(memory)),
        ctypes.c_long(_PREFERRED if len(nodes) == 1 else _INTERLEAVE),
        words,
        ctypes.c_ulong(_NODES_MAX),
        ctypes.c_ulong(0),
    )
    if not failed:
        return None
    reason = os.strerror(ctypes.get_errno())
    hint = " (in Docker: --cap-add SYS_NICE)" if ctypes.get_errno() == errno.EPERM else ""
    return reason + hint


def bind_thread(cores: Collection[int]) -> None:
    """Keep the calling thread on those of the cores that it may use, if there are any; where the
    system refuses, it stays where it is."""
    usable = os.sched_getaffinity(0).intersection(cores)
    if usable:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, usable)


def describe(nodes: Sequence[int]) -> str:
    """Nodes in words."""
    names = ", ".join(map(str, nodes))
    return f"node {names}" if len(nodes) == 1 else f"nodes {names}"


def _is_gpu(device: Path) -> bool:
    kind = _read(device / "class")
    return _read(device / "vendor") == _NVIDIA and kind.startswith(_DISPLAY)


def _facts(text: str) -> dict[str, str]:
    """Lines like "Device Minor: 3"."""
    pairs = [line.partition(":") for line in text.splitlines()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbers(text: str) -> list[int]:
    """What a list like "0-2,5" names."""
    numbers: list[int] = []
    for piece in text.split(",") if text else []:
        first, _, last = piece.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
