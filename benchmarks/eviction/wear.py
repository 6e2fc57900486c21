"""Write budgets of a disk: what is left of the hits, and whether all that is written is counted.

    python -m benchmarks.eviction.wear --trace requests.jsonl [--block 64MiB]
                                       [--sizes 9.6GiB+202GiB,...]
    python -m benchmarks.eviction.wear --audit FOLDER [--block 1MiB] [--blocks 256]

With a trace (JSON lines with `timestamp` and `hash_ids`, like `kvtier plan --trace`), for each size
of CPU memory and disk: the hits that the two serve together with all written through, and with
budgets of a half, a quarter and a tenth of what that writes; beside them `second_touch` and
`on_evict`, which know of no budget. With --audit: blocks are stored in a folder on a real disk, and
what the system counted of this process's writes is compared with what the folder's budget counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Report
from kvtier.backends.nvme.backend import BACKEND
from kvtier.backends.nvme.settings import NvmeSettings
from kvtier.backends.nvme.wear import NAME, read_entry
from kvtier.eviction.traces import read_trace
from kvtier.interfaces.tier import TierContext
from kvtier.observe.simulate import Simulation, TierPlan, Trace, simulate_all
from kvtier.record.record import record_bytes
from kvtier.settings import Admission, ByteSize, Capacity, WritePolicy, WriteRate
from kvtier.testing.subject import make_keys, sealed
from kvtier.types import Namespace

SHARES = (0.5, 0.25, 0.1)
SIZES = "9.6GiB+202GiB,64GiB+640GiB,128GiB+2560GiB"
REMEMBERED = 1 << 16
THROUGH, ON_EVICT = WritePolicy.THROUGH, WritePolicy.ON_EVICT
ALWAYS, SECOND = Admission.ALWAYS, Admission.SECOND_TOUCH


def of_trace(file: Path, block: int, sizes: str, report: Report) -> None:
    """Hits over budgets, for each size."""
    trace = Trace(read_trace(file))
    for size in sizes.split(","):
        memory, disk = (ByteSize.parse(part).bytes // block for part in size.split("+"))

        def stack(
            rate: float | None = None,
            write: WritePolicy = THROUGH,
            admission: Admission = ALWAYS,
            memory: int = memory,
            disk: int = disk,
        ) -> list[TierPlan]:
            host = TierPlan("cpu", memory, "adaptive", THROUGH, ALWAYS)
            return [host, TierPlan("nvme", disk, "adaptive", write, admission, REMEMBERED, rate)]

        free, twice, late = simulate_all(
            [
                (trace, stack()),
                (trace, stack(None, THROUGH, SECOND)),
                (trace, stack(None, ON_EVICT)),
            ]
        )
        written = free.tiers[1].written
        rates = [share * written / trace.seconds for share in SHARES]
        budgets = simulate_all([(trace, stack(rate)) for rate in rates])
        report.add(f"{size}: written through", written * block / (1 << 40), "TiB")
        report.add(f"{size}: its hits", 100 * free.hits / free.references, "% of blocks")
        for share, found in zip(SHARES, budgets, strict=True):
            _tell(report, f"{size}: budget of {share:.0%}", found, free)
        _tell(report, f"{size}: second_touch", twice, free)
        _tell(report, f"{size}: on_evict", late, free)


def _tell(report: Report, name: str, found: Simulation, free: Simulation) -> None:
    kept, written = found.hits / free.hits, found.tiers[1].written / free.tiers[1].written
    if "25%" in name:
        report.at_least(f"{name}, hits kept", 100 * kept, "%", 85)
    else:
        report.add(f"{name}, hits kept", 100 * kept, "%")
    report.add(f"{name}, written", 100 * written, "%")


def _counted() -> Iterator[int]:
    """What the system says that this process has had written so far: in the end all of it."""
    while True:
        lines = Path("/proc/self/io").read_text().splitlines()
        yield int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def audit(folder: Path, block: int, blocks: int, report: Report) -> None:
    """Store blocks as an engine does, and compare two counts of the bytes."""
    namespace = Namespace(facts={"model": "audit"}, group_bytes=(block - 4096,))
    size = record_bytes(namespace.payload_bytes)
    with tempfile.TemporaryDirectory(prefix="kvtier-audit-", dir=folder) as name:
        settings = NvmeSettings(
            capacity=Capacity(ByteSize(2 * blocks * size)),
            path=name,
            free_floor=ByteSize(0),
            writes=WriteRate(ByteSize(1 << 50), "h"),
        )
        context = TierContext(namespace)
        tier = BACKEND.open_tier(settings, context)
        handler = BACKEND.open_handler(settings, context)
        tier.refresh()
        counted = _counted()
        before, stored = next(counted), 0
        for start in range(0, blocks, 8):
            keys = make_keys(min(8, blocks - start), start=start)
            while not (taken := tier.prepare_store(keys)).keys:
                tier.refresh()
            records = [sealed(key, namespace) for key in taken.keys]
            outcomes = handler.store(taken.spec, taken.keys, records)
            failed = {k: o for k, o in zip(taken.keys, outcomes, strict=True) if not o.ok}
            tier.complete_store(taken.keys, failed)
            stored += len(taken.keys) - len(failed)
        after = next(counted)
        handler.close()
        tier.close()
        entry = read_entry(Path(name) / NAME)
        assert entry is not None
        report.add("blocks stored", stored, f"of {size} bytes")
        report.add("counted by the folder's budget", entry.written / 1e6, "MB")
        report.add("counted by the system (/proc/self/io)", (after - before) / 1e6, "MB")
        off = 100 * ((after - before) / entry.written - 1)
        report.at_most("the system's count is above it by", off, "%", 2)


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--audit", type=Path, metavar="FOLDER")
    parser.add_argument("--block")
    parser.add_argument("--blocks", type=int, default=256)
    given = parser.parse_args()
    if given.trace is None and given.audit is None:
        parser.error("name a trace, or a folder to audit")
    report = Report("Write budgets")
    if given.trace is not None:
        of_trace(given.trace, ByteSize.parse(given.block or "64MiB").bytes, given.sizes, report)
    if given.audit is not None:
        audit(given.audit, ByteSize.parse(given.block or "1MiB").bytes, given.blocks, report)
    report.finish()


if __name__ == "__main__":
    main()
