"""The CUDA runtime that torch has loaded."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from typing import Any

from kvtier.core.system.numa import Topology

logger = logging.getLogger(__name__)


def forget_error(cudart: Any) -> None:
    """An error that was dealt with must not be reported by the next call that has none."""
    cudart.cudaGetLastError()


def leave_captures_alone() -> None:
    """Let this thread work while another one captures a graph, which it would spoil otherwise."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_CAPTURE_RELAXED = 2


def cores_near(index: int, topology: Topology) -> set[int]:
    """The cores of the NUMA node that a device is at; empty if there is nothing to choose."""
    name = ctypes.create_string_buffer(32)
    cudart = runtime()
    if cudart.cudaDeviceGetPCIBusId(name, ctypes.c_int(len(name)), ctypes.c_int(index)):
        forget_error(cudart)
        return set()
    node = topology.node_of(name.value.decode())
    cores = topology.cores(node)
    if cores:
        logger.info("copies of CUDA device %d run on the cores of NUMA node %d", index, node)
    return cores


_RUNTIME = re.compile(r"libcudart(-\w+)?\.so[.\d]*")


@functools.cache
def runtime() -> ctypes.CDLL:
    """The CUDA runtime in this process: torch has loaded one, and there must not be two.

    Looked for once: an engine has thousands of mappings, and each thread of a copier asks. Others
    load stand-ins of a similar name (TileLang's `libcudart_stub.so`).
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.removesuffix(" (deleted)\n") for line in maps if "libcudart" in line]
    mapped = {line.rstrip("\n").split(maxsplit=5)[-1] for line in lines}
    paths = [path for path in mapped if _RUNTIME.fullmatch(path.rpartition("/")[2])]
    if not paths:
        raise RuntimeError("torch has loaded no CUDA runtime: this is a build without CUDA")
    return ctypes.CDLL(sorted(paths)[0])
