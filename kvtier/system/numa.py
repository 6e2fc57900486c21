"""Which memory and which cores lie near which GPU, as the kernel and the driver tell it.

A machine with one node has nothing to choose, and neither has one that says nothing: the answers
are empty then, and nothing is placed or bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.record.record import Buffer

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
        ctypes.c_void_p(int(np.frombuffer(memory, np.uint8).ctypes.data)),
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
