"""What an engine's start waits for on a GPU, and what pinning costs one that runs.

    python -m benchmarks.gpu.ready [GIB]

One line of JSON for each figure: taking fresh memory by one thread and by several, registering and
giving back memory that is mapped already or not, how late the launches of a loop are while the rest
is pinned beside it, and building the kernels with an empty cache and with a full one.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.device.cuda.device import CudaRegistrar
from kvtier.device.pacing import EngineSteps
from kvtier.device.pinned import PinnedMemory, PinPlan
from kvtier.slab.layout import PIECE_BYTES
from kvtier.system import memory as taking
from kvtier.system.memory import GIB, address_of, populate

FOLDER = Path("/dev/shm")
SLOT_BYTES = 32 << 20
BESIDE_S = 5.0
_BUILD = """
import time
import torch
from kvtier.device.cuda import runtime, staging_buffers
torch.zeros(1, device="cuda")
began = time.monotonic()
staging_buffers.try_out(torch, 0, runtime.runtime_copy(torch))
print(time.monotonic() - began)
"""


def say(what: str, **figures: float) -> None:
    """One line."""
    print(json.dumps({"what": what, **{name: round(each, 4) for name, each in figures.items()}}))


@contextmanager
def fresh(size: int) -> Iterator[int]:
    """A file in memory that has none yet."""
    fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def mapped(fd: int, size: int) -> Iterator[memoryview]:
    with mmap.mmap(fd, size) as mapping, memoryview(mapping) as view:
        yield view


def take(size: int) -> None:
    """By so many threads."""
    several = taking._THREADS
    for threads in (1, several):
        taking._THREADS = threads
        with fresh(size) as fd, mapped(fd, size) as view:
            began = time.monotonic()
            populate(view, "taking memory")
            say("taking fresh memory", threads=threads, gib_s=size / GIB / _since(began))
    taking._THREADS = several


def pin(registrar: CudaRegistrar, fd: int, size: int, *, map_first: bool) -> None:
    """Register a new mapping of memory that is there, and give it back."""
    with mapped(fd, size) as view:
        if map_first:
            began = time.monotonic()
            populate(view, "mapping memory")
            say("mapping memory that is there", gib_s=size / GIB / _since(began))
        taken = []
        for at in range(0, size, PIECE_BYTES):
            began = time.monotonic()
            registrar.register(address_of(view) + at, min(PIECE_BYTES, size - at))
            taken.append(_since(began))
        say("pinning", mapped=map_first, gib_s=size / GIB / sum(taken), longest_ms=max(taken) * 1e3)
        began = time.monotonic()
        for at in range(0, size, PIECE_BYTES):
            registrar.unregister(address_of(view) + at)
        say("giving back", gib_s=size / GIB / _since(began))


def launch_beside(torch: Any, registrar: CudaRegistrar | None, view: memoryview) -> None:
    """How long the launches of a loop take that stands for an engine, alone or beside pinning."""
    steps, stopping, number = EngineSteps(), threading.Event(), torch.zeros(1024, device="cuda")
    memory = PinnedMemory(view, SLOT_BYTES, registrar, PinPlan(steps)) if registrar else None
    steps.began()
    thread = threading.Thread(target=memory.pin_rest, args=(stopping,)) if memory else None
    if thread is not None:
        thread.start()
    times, end = [], time.monotonic() + BESIDE_S
    while time.monotonic() < end:
        began = time.monotonic()
        steps.began()
        for _ in range(100):
            number += 1
        torch.cuda.synchronize()
        steps.ended()
        times.append(_since(began))
    stopping.set()
    if thread is not None and memory is not None:
        thread.join()
        memory.close()
    times.sort()
    say(
        "a step of 100 launches",
        beside=memory is not None,
        median_ms=times[len(times) // 2] * 1e3,
        late_ms=times[len(times) * 99 // 100] * 1e3,
        longest_ms=times[-1] * 1e3,
    )


def build() -> None:
    """With an empty cache, and with a full one."""
    with tempfile.TemporaryDirectory() as cache:
        for full in (False, True):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            command = [sys.executable, "-c", _BUILD]
            said = subprocess.check_output(command, env=environment, text=True)
            say("building and trying kernels", full_cache=full, seconds=float(said.split()[-1]))


def _since(began: float) -> float:
    return max(1e-9, time.monotonic() - began)


def main(size: int) -> None:
    import torch

    registrar = CudaRegistrar(torch.cuda.cudart())
    take(size)
    with fresh(size) as fd:
        with mapped(fd, size) as view:
            populate(view, "taking memory")
        for map_first in (False, True):
            pin(registrar, fd, size, map_first=map_first)
        with mapped(fd, size) as view:
            for beside in (None, registrar):
                launch_beside(torch, beside, view)
    build()


if __name__ == "__main__":
    main(int(sys.argv[1] if len(sys.argv) > 1 else 8) * GIB)
