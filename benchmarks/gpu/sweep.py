"""What the numbers that the copies were built with do on this GPU: `make bench-gpu-sweep`.

Each variant changes one or two of them, and all are measured briefly, in some four minutes: the
steps of a batch, loads and stores alone, loads beside stores and beside matrix products, and what
one of these loses meanwhile. The usual numbers come first and last, also where there is no time for
others (LIMIT_S=seconds): what lies between those two says nothing. JSON=path is written all the
while.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.gpu.arena import LOAD, STORE, Arena, in_turns, seconds_of
from benchmarks.gpu.beside import Duplex, product_of, products_of, small_copy_of
from benchmarks.gpu.copies import device_or_exit
from benchmarks.gpu.kernels import steps_of_a_batch
from benchmarks.gpu.parts import run_part
from benchmarks.report import Report
from kvtier.device.cuda import kernels, paths, staging_buffers
from kvtier.device.cuda.copier import CudaCopier

SIZE = 2 << 30
PAGES = [16 << 10, 64 << 10, 2 << 20]
TURNS, PRODUCTS = 3, 150
SECONDS = float(os.environ.get("LIMIT_S", 300.0))
"""No variant begins that would leave no time for the last one, if both take as long as the longest
that came to its end."""
VARIANT_SECONDS = 60.0
"""For one, of which twenty seconds are usual: one that hangs must not be the only one."""


class Variant(NamedTuple):
    """The numbers; as they are unless it says otherwise."""

    title: str
    share: int = kernels.SHARE
    batch: int = CudaCopier._BATCH_BYTES
    buffers: int = staging_buffers._EACH_WAY
    """As many threads, too: one that waits for a buffer is of no use."""
    stores: float = paths.STORES_SHARE
    sending: int = paths.STORES_AT_ONCE
    queues: int = 0
    """Queues of the device, which its streams share: as many as there are if it says nothing."""

    @property
    def budget(self) -> int:
        """What all these buffers take."""
        return max(staging_buffers.BUDGET_BYTES, 2 * self.buffers * self.batch)


VARIANTS = [
    Variant("as they are"),
    Variant("a sixteenth of the multiprocessors", share=16),
    Variant("a quarter of the multiprocessors", share=4),
    Variant("all of the multiprocessors", share=1),
    Variant("stores give no way to loads", stores=1.0),
    Variant("stores have a quarter of the time", stores=0.25),
    Variant("a store at once", sending=1),
    Variant("3 stores at once", sending=3),
    Variant("32 queues", queues=32),
    Variant("2 buffers", buffers=2),
    Variant("4 buffers", buffers=4),
    Variant("batches of 32 MiB", batch=32 << 20),
    Variant("batches of 128 MiB", batch=128 << 20),
    Variant("as they are, again"),
]


@contextmanager
def built_with(variant: Variant) -> Iterator[None]:
    """Copiers that are opened meanwhile have a variant's numbers."""
    places: list[tuple[Any, str, float]] = [
        (paths, "STORES_SHARE", variant.stores),
        (paths, "STORES_AT_ONCE", variant.sending),
        (kernels, "SHARE", variant.share),
        (CudaCopier, "_BATCH_BYTES", variant.batch),
        (staging_buffers, "_EACH_WAY", variant.buffers),
        (staging_buffers, "BUDGET_BYTES", variant.budget),
    ]
    usual = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(places, usual, strict=True):
            setattr(owner, name, value)


def alone(torch: Any, report: Report, variant: Variant) -> None:
    """Loads and stores of pages of several sizes, one after the other."""
    for page in PAGES:
        arena = Arena.even(torch, page, SIZE, threads=variant.buffers)
        try:
            must_be_staged(arena)
            blocks = arena.shuffled()
            contestants: dict[str, Callable[[], object]] = {
                "store": functools.partial(arena.move, STORE, blocks),
                "load": functools.partial(arena.move, LOAD, blocks),
            }
            for name, taken in in_turns(contestants, TURNS).items():
                title = f"{variant.title}: {name}, pages of {page >> 10} KiB"
                report.add(title, arena.bytes / taken / 1e9, "GB/s")
        finally:
            arena.close()


def together(torch: Any, report: Report, variant: Variant) -> None:
    """Loads beside stores, and beside matrix products, and one of these beside both."""
    duplex = Duplex(torch, SIZE, variant.buffers)
    product, small, products = product_of(torch), small_copy_of(torch), products_of(torch)
    try:
        must_be_staged(duplex.arena)

        def turn() -> tuple[float, ...]:
            seconds = seconds_of(duplex.load), *duplex.load_beside_stores()
            computing = duplex.load_beside_products(lambda: products(PRODUCTS)[1])
            return *seconds, computing, product(), *duplex.beside(lambda: (product(), small()))

        turns = [turn() for _ in range(TURNS + 1)][1:]
    finally:
        duplex.arena.close()
    columns = zip(*turns, strict=True)
    medians = [statistics.median(column) for column in columns]
    calm_load, busy_load, stores, computing, calm, busy, late = medians
    for name, taken in (
        ("loads while stores run", busy_load),
        ("stores meanwhile", stores),
        ("loads while matrix products run", computing),
    ):
        report.add(f"{variant.title}: {name}", duplex.bytes / taken / 1e9, "GB/s")
    for name, ratio in (("loads lose", busy_load / calm_load), ("a product loses", busy / calm)):
        report.add(f"{variant.title}: {name} meanwhile", (ratio - 1) * 100, "%")
    report.add(f"{variant.title}: 4 KiB to the device take meanwhile", late, "us")
    if not duplex.outlasted:
        print(f"{variant.title}: what disturbs ended too early: it disturbs more", flush=True)


def must_be_staged(arena: Arena) -> None:
    """Page by page, all these numbers say nothing."""
    if not (arena.copier.staged):
        raise RuntimeError("nothing is staged here: the warning above says why")


def measure(torch: Any, variant: Variant, report: Report) -> None:
    """Everything of one variant, by a process that has not used CUDA yet."""
    if variant.queues:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(variant.queues)
    with built_with(variant):
        steps_of_a_batch(torch, report, f"{variant.title}: ")
        alone(torch, report, variant)
        together(torch, report, variant)


def main() -> None:
    """Measure the variants that there is time for."""
    torch, name, when = device_or_exit()
    report = Report(f"copies on {name} with other numbers, {when} UTC")
    end, longest, failed = time.perf_counter() + SECONDS, 0.0, []
    for variant in VARIANTS:
        began = time.perf_counter()
        behind = 0.0 if variant is VARIANTS[-1] else longest
        if began + longest + behind > end:
            print(f"{variant.title}: no time left", flush=True)
        elif run_part(functools.partial(measure, torch, variant), report, VARIANT_SECONDS):
            longest = max(longest, time.perf_counter() - began)
        else:
            failed.append(variant.title)
    report.finish()
    if failed:
        sys.exit(f"these variants failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
