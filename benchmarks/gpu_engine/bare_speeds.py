"""What the link to the device and the disk do by themselves; a process of its own, so that the run
itself has no context on the device.

    python -m benchmarks.gpu_engine.bare_speeds cuda FOLDER
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 8 << 20
THREADS = 8


def link(size: int = 1 << 30) -> dict[str, float]:
    """GB/s of pinned memory, each way; the best of eight."""
    import torch

    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    found = {}
    for name, target, source in (("to the device", device, host), ("to the host", host, device)):
        best = 0.0
        for _ in range(8):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, size / (time.perf_counter() - began) / 1e9)
        found[name] = best
    return found


def disk(folder: Path, each: int) -> dict[str, float]:
    """GB/s of eight threads with O_DIRECT; the second reading counts."""
    paths = [folder / f"bare-{number}" for number in range(THREADS)]

    def move(path: Path, write: bool) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        try:
            with mmap.mmap(-1, PIECE) as memory:
                memory[:] = os.urandom(1 << 20) * (PIECE >> 20)
                for at in range(0, each, PIECE):
                    (os.pwritev if write else os.preadv)(fd, [memory], at)
        finally:
            os.close(fd)

    found = {}
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for name, write in (("written", True), ("read", False), ("read", False)):
                began = time.perf_counter()
                list(pool.map(move, paths, [write] * THREADS))
                found[name] = THREADS * each / (time.perf_counter() - began) / 1e9
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    return found


if __name__ == "__main__":
    on_device = sys.argv[1] == "cuda"
    speeds = disk(Path(sys.argv[2]), (256 if on_device else 16) << 20)
    print(json.dumps({**(link() if on_device else {}), **speeds}))
