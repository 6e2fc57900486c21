"""What is on the link, and how long kernels take, while batches pass each other: figures of a
timeline that torch's profiler records, and the timeline itself for whoever looks for what waits."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.beside import Duplex
from benchmarks.report import Report

SIZE = 2 << 30
KERNELS = ("bring_numbers", "move_pages", "add_blocks", "finish_sums")


class Span(NamedTuple):
    """Something that the device did, in microseconds."""

    name: str
    start: float
    end: float


def busy(spans: Sequence[Span]) -> float:
    """How long at least one of them went on."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def tell(report: Report, title: str, spans: Sequence[Span]) -> None:
    """Whether the link was ever idle, and carried several at once; and what kernels took."""
    for where, what in (("to the device", "HtoD"), ("to the host", "DtoH")):
        copies = [span for span in spans if what in span.name]
        if not copies:
            continue
        whole = max(each.end for each in copies) - min(each.start for each in copies)
        on_link = busy(copies)
        report.add(f"{title}: copies {where} are on the link", 100 * on_link / whole, "%")
        at_once = sum(each.end - each.start for each in copies) / on_link
        report.add(f"{title}: copies {where} at once", at_once, "")
    for name in KERNELS:
        taken = [span.end - span.start for span in spans if span.name.startswith(name)]
        if taken:
            report.add(f"{title}: {name} takes", statistics.median(taken), "us")


def recorded(torch: Any, action: Callable[[], object], path: Path | None) -> list[Span]:
    """What the device does meanwhile; kept in a file that chrome://tracing shows."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        action()
        torch.cuda.synchronize()
    if path is not None:
        profile.export_chrome_trace(str(path))
    times = [(each.name, each.time_range) for each in profile.events()]
    return [Span(name, time.start, time.end) for name, time in times]


def timeline(torch: Any, report: Report) -> None:
    """Loads alone, and beside stores; a file of each lies beside the figures."""
    duplex = Duplex(torch, SIZE)
    contestants: dict[str, Callable[[], object]] = {
        "loads": lambda: duplex.load(1),
        "loads beside stores": lambda: duplex.load_beside_stores(1),
    }
    figures = os.environ.get("JSON")
    for title, action in contestants.items():
        action()  # which warms up
        name = f".{title.replace(' ', '-')}.json.gz"
        path = Path(figures).with_suffix(name) if figures else None
        tell(report, f"timeline of {title}", recorded(torch, action, path))
    duplex.arena.close()
