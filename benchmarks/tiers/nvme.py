"""The NVMe tier beside vLLM's own file tier and bare system calls, in one run, interleaved.

    make bench-nvme              JSON=result.json make bench-nvme
    python -m benchmarks.tiers.nvme --folder /mnt/nvme --chunks 1MiB

kvtier moves records (header, checksum) through its mover on threads; vLLM's tier moves the same
payloads with its own thread pool; bare is preadv and pwritev of whole slots. A load ends in host
memory. "To pages" it ends in an engine's KV tensors: kvtier's copier proves every byte on the way
there, what the peers have read is copied as it is.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import rotated
from benchmarks.report import Report
from benchmarks.tiers.catalogue import measure_catalogue
from benchmarks.tiers.pages import Pages, Slots, open_tier, slots_of
from benchmarks.tiers.peers import BareSlab, VllmFiles, shared_memory
from kvtier.interfaces.mover import Transfer, TransferKind
from kvtier.move.threads import ThreadMover
from kvtier.record import record as records
from kvtier.settings import ByteSize
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, block_key

COUNT = 256
SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20}
MANY = 16
TARGETS = {  # one job: store, load; 16 jobs: store, load
    "128KiB": (2.0, 2.0, 1.2, 1.0),
    "1MiB": (1.5, 1.5, 1.1, 1.0),
    "4MiB": (1.5, 1.2, 1.2, 1.0),
}


Specs = tuple[LoadStoreSpec, LoadStoreSpec]
Measured = dict[tuple[str, str, int], list[float]]
"""Seconds, by contestant, what it does, and in how many jobs."""


class Kvtier:
    """The cpu and nvme tiers with a mover between, called as the chain calls them."""

    name = "kvtier"

    def __init__(self, folder: Path, payload: int, count: int) -> None:
        self._host = Slots(payload, count, spare=count)
        self._cpu = self._host.tier
        size = 2 * count * records.record_bytes(payload) + (4 << 20)
        place = {"path": str(folder / "kvtier"), "free_floor": ByteSize(0)}
        self._nvme, handler = open_tier("nvme", payload, size, **place)
        pages, digest = Pages(payload, count), self._host.namespace.digest
        self._begin_copies, self._copier = pages.copier(self._host.handler.region, digest)
        self._mover = ThreadMover([self._host.handler, handler], self._host.namespace)
        self._ids = itertools.count(1)
        self._round = 0
        self._grow()

    def _grow(self) -> None:
        """Have all slabs made: what is measured is a cache that is in use, not an empty folder."""
        held: list[BlockKey] = []
        keys = (block_key(b"room%d" % i) for i in itertools.count())
        while more := self._nvme.prepare_store(list(itertools.islice(keys, 64)), evict=False).keys:
            held += more
            self._nvme.refresh()
        self._nvme.complete_store(held, dict.fromkeys(held, Outcome.CANCELLED))
        self._nvme.flush()

    def _keys(self) -> list[BlockKey]:
        return [block_key(b"%d/%d" % (self._round, i)) for i in range(len(self._host.views))]

    def prepare(self) -> None:
        """What the worker that stores would have done: headers and checksums in the CPU slots."""
        self._round += 1
        for key, view in zip(self._keys(), self._host.payloads, strict=True):
            view[: len(key)] = key
        self._host.seal(self._keys())

    def store(self, jobs: int) -> None:
        """CPU -> NVMe, committed."""
        keys = self._keys()
        reservation = self._nvme.prepare_store(keys)
        assert reservation.keys == keys
        self._move(TransferKind.STORE, keys, (self._host.spec, reservation.spec), jobs)
        self._nvme.complete_store(keys)

    def load(self, jobs: int) -> None:
        """NVMe -> CPU, every header proved."""
        self._load(jobs, to_pages=False)

    def to_pages(self, jobs: int) -> None:
        """NVMe -> CPU -> pages, every byte proved."""
        self._load(jobs, to_pages=True)

    def _load(self, jobs: int, *, to_pages: bool) -> None:
        keys = self._keys()
        spec = self._nvme.prepare_load(keys)
        into = self._cpu.prepare_store(keys, evict=False)
        assert into.keys == keys
        wait = self._begin_copies(keys, slots_of(into.spec)) if to_pages else None
        self._move(TransferKind.LOAD, keys, (spec, into.spec), jobs)
        if wait is not None:
            wait()
        self._nvme.complete_load(keys)
        self._cpu.complete_store(keys)
        self._cpu.forget(keys)

    def _move(self, kind: TransferKind, keys: list[BlockKey], specs: Specs, jobs: int) -> None:
        """In so many jobs; the specs are of the source and of the target."""
        source, target = (1, 0) if kind is TransferKind.LOAD else (0, 1)
        size = len(keys) // jobs
        for start in range(0, len(keys), size):
            stop = start + size
            source_spec, target_spec = (spec.select(start, stop) for spec in specs)
            accepted = self._mover.submit(
                Transfer(
                    id=next(self._ids),
                    kind=kind,
                    source=source,
                    target=target,
                    keys=keys[start:stop],
                    source_spec=source_spec,
                    target_spec=target_spec,
                    deadline=time.monotonic() + 60,
                    prove=False,
                )
            )
            assert accepted
        while jobs:
            self._mover.wait(1.0)
            for result in self._mover.poll():
                jobs -= 1
                assert all(outcome is Outcome.OK for outcome in result.outcomes)

    def prove(self, jobs: int) -> None:
        """The checksums alone: what the peers do without."""
        for payload in self._host.payloads:
            records.part_sum(payload)

    def forget(self) -> None:
        """The tier evicts by itself."""

    def close(self) -> None:
        self._copier.close()
        self._mover.close()
        self._nvme.close()
        self._cpu.close()


def timed(job: Callable[[int], None], jobs: int) -> tuple[float, float]:
    """Wall and CPU seconds of a job."""
    cpu, wall = time.process_time(), time.perf_counter()
    job(jobs)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(report: Report, label: str, payload: int, folder: Path, rounds: int) -> None:
    """All contestants, one after the other in every round; medians and ratios."""
    slot = records.record_bytes(payload)
    memory = memoryview(shared_memory(slot * COUNT))
    kvtier = Kvtier(folder, payload, COUNT)
    pages = Pages(payload, COUNT)

    def copy(views: Sequence[memoryview]) -> None:
        pages.copy([view[:payload] for view in views])

    peers: list[Any] = [BareSlab(folder, memory, slot, COUNT, copy)]
    try:
        peers.append(VllmFiles(folder, memory, payload, COUNT, copy))
    except ImportError:
        print("vLLM is not installed here: measuring without it")
    walls: Measured = defaultdict(list)
    cpus: Measured = defaultdict(list)
    contestants = [kvtier, *peers]
    for number in range(rounds + 2):
        for contestant in rotated(contestants, number):
            for jobs in (1, MANY):
                if contestant is kvtier:
                    kvtier.prepare()
                gc.collect()
                for what in ("store", "load", "to_pages"):
                    wall, cpu = timed(getattr(contestant, what), jobs)
                    if number >= 2:  # the first rounds warm up, and fill the slabs once
                        walls[contestant.name, what, jobs].append(wall)
                        cpus[contestant.name, what, jobs].append(cpu)
                if contestant is kvtier and number >= 2:
                    cpus["checksums", "load", jobs].append(timed(kvtier.prove, jobs)[1])
                contestant.forget()
    for contestant in contestants:
        contestant.close()
    summarize(report, label, payload, walls, cpus)


def summarize(report: Report, label: str, payload: int, walls: Measured, cpus: Measured) -> None:
    """Medians as MB/s, and kvtier's ratios to the others."""
    gigabytes = COUNT * payload / 1e9
    wall = {key: statistics.median(values) for key, values in walls.items()}
    cpu = {key: statistics.median(values) for key, values in cpus.items()}
    for (name, what, jobs), seconds in sorted(wall.items()):
        report.add(f"{label} {what} x{jobs} {name}", gigabytes * 1e3 / seconds, "MB/s")
    targets = iter(TARGETS[label])
    for jobs, what in itertools.product((1, MANY), ("store", "load", "to_pages")):
        target = next(targets) if what != "to_pages" else 1.0
        mine = wall["kvtier", what, jobs]
        report.at_least(
            f"{label} {what} x{jobs} against bare", wall["bare", what, jobs] / mine, "x", 0.85
        )
        if ("vllm", what, jobs) in wall:
            ratio = wall["vllm", what, jobs] / mine
            report.at_least(f"{label} {what} x{jobs} against vllm", ratio, "x", target)
            share = cpu["kvtier", what, jobs] / cpu["vllm", what, jobs]
            most = 1.0 if what == "store" else 1.3
            report.at_most(f"{label} {what} x{jobs} CPU against vllm", share, "x", most)
        for name in ("kvtier", "bare", "vllm", "checksums"):
            if (name, what, jobs) in cpu:
                seconds = cpu[name, what, jobs] / gigabytes
                report.add(f"{label} {what} x{jobs} CPU of {name}", seconds, "s/GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where to measure (default: a temporary one)")
    parser.add_argument("--chunks", choices=[*SIZES, "none"], action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-catalogue", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    report = Report("NVMe tier: medians, ratios above 1 are in kvtier's favour")
    for label in arguments.chunks or SIZES:
        if label == "none":
            continue
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            compare(report, label, SIZES[label], Path(folder), arguments.rounds)
    if not arguments.no_catalogue:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measure_catalogue(report, Path(folder))
    report.finish()


if __name__ == "__main__":
    main()
