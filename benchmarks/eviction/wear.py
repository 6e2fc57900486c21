"""Write budgets of a disk: whether all that is written is counted.

    python -m benchmarks.eviction.wear FOLDER [--block 1MiB] [--blocks 256]

Blocks are stored in a folder on a real disk, and what the system counted of this process's writes
is compared with what the folder's budget counted. (What budgets leave of the hits of a trace is
what `kvtier plan --trace` says.)
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Report
from kvtier.backends.nvme.backend import BACKEND
from kvtier.backends.nvme.settings import NvmeSettings
from kvtier.backends.nvme.write_budget import NAME, read_entry
from kvtier.interfaces.tier import TierContext
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, WriteRate
from kvtier.testing.subject import make_keys, sealed
from kvtier.types import Namespace


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
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block", type=ByteSize.parse, default=ByteSize(1 << 20))
    parser.add_argument("--blocks", type=int, default=256)
    given = parser.parse_args()
    report = Report("A write budget's count")
    audit(given.folder, given.block.bytes, given.blocks, report)
    report.finish()


if __name__ == "__main__":
    main()
