"""How long each step of a batch takes, on the device and as the host sees it, while nothing else is
there."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.arena import chunk_of, even_layout, seconds_of
from benchmarks.report import Report
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.cuda.device import Cuda

PAGE = 16 << 10
BYTES_MAX = 64 << 20
ROUNDS = 10


def steps_of_a_batch(torch: Any, report: Report) -> None:
    """Gathering, adding up and scattering a batch of random pages, and carrying it both ways."""
    per_chunk = chunk_of(PAGE)
    _, probe = even_layout(torch, PAGE, 1, per_chunk)
    rows = max(1, min(CudaCopier._BATCH_BYTES, BYTES_MAX) // probe.part_bytes[0])
    pool, layout = even_layout(torch, PAGE, 2 * rows * per_chunk, per_chunk)
    stage: Any = Cuda(0).stages(layout, CudaCopier._BATCH_BYTES, urgent=True)[0]
    rows = min(rows, stage.rows[0])
    size = layout.part_bytes[0]
    host = torch.empty(rows * size, dtype=torch.uint8, pin_memory=True)
    addresses = int(host.data_ptr()) + size * np.arange(rows, dtype=np.int64)
    ids = np.random.default_rng(0).permutation(layout.blocks[0])[: rows * per_chunk]
    ids = ids.reshape(rows, per_chunk)
    steps: dict[str, Callable[[], object]] = {
        "gathering": lambda: stage.gather(0, ids),
        "adding up": lambda: stage.digest(0, rows),
        "scattering": lambda: stage.scatter(0, ids),
        "sending": lambda: stage.send(0, addresses),
        "fetching": lambda: stage.fetch(0, addresses),
    }

    def taken(step: Callable[[], object]) -> float:
        """Microseconds; those in which the host begins it do not count: the device is busy then."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        held = [stage.fetch(0, addresses)]
        start.record(stage._stream)
        held.append(step())
        stop.record(stage._stream)
        stop.synchronize()
        del held
        return float(start.elapsed_time(stop)) * 1000

    def seen(step: Callable[[], object]) -> float:
        """Microseconds until a thread that began it and sleeps meanwhile goes on."""

        def whole() -> None:
            held = step()
            stage.record().synchronize()
            del held

        return seconds_of(whole) * 1e6

    for name, step in steps.items():
        what = f"{name} {rows * size >> 20} MiB of pages of 16 KiB takes"
        for whose, clock in (("", taken), (" the thread that waits", seen)):
            middle = statistics.median([clock(step) for _ in range(ROUNDS + 1)][1:])
            report.add(f"{what}{whose}", middle, "us")
    del pool
