"""The NVMe catalogue: lookups by a process that wrote nothing, and opening after a crash.

Every measurement runs in a process of its own:

    python -m benchmarks.tiers.catalogue WHAT FOLDER COUNT
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.measure import memory
from benchmarks.report import Report
from kvtier.backends.nvme import NvmeTier
from kvtier.chain.store import LOOKED_AT
from kvtier.interfaces.backend import TierContext, backend
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity
from kvtier.slab import layout
from kvtier.slab.folder import FolderLimits, SlabFolder
from kvtier.slab.shares import create_slab
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, Namespace, Presence, block_key

NAMESPACE = Namespace(facts={"model": "catalogue"}, group_bytes=(4096,))
CONTEXT = TierContext(NAMESPACE, "catalogue")


def keys(count: int, salt: str = "") -> list[BlockKey]:
    """Keys as vLLM makes them: a sha256 and a group."""
    return [block_key(hashlib.sha256(f"{salt}{i}".encode()).digest()) for i in range(count)]


def write_and_die(folder: Path, count: int) -> None:
    """Commit `count` blocks to the table the way the handler does, then be killed.

    Payloads are left out: opening reads tables only, and they are written in full.
    """
    slot = record_bytes(4096)
    space = SlabFolder(folder, NAMESPACE, Disk())
    owner, _ = space.claim()
    limits = FolderLimits(
        capacity=2 * count * (slot + 64), free_floor=0, slot_bytes=slot, slab_bytes=1 << 30
    )
    made = keys(count)
    done = 0
    while done < count:
        slab = create_slab(space, owner, (1 << 30) // slot, limits)
        assert slab is not None
        part = made[done : done + slab.header.slots]
        entries = layout.pack_entries(layout.VALID, part, 0, 1)
        with space.table_path(slab.id).open("r+b") as table:
            table.seek(layout.TABLE_AT)
            table.write(entries)
        done += len(part)
    os.kill(os.getpid(), signal.SIGKILL)


def open_tier(folder: Path) -> NvmeTier:
    nvme = backend("nvme")
    settings = nvme.settings(
        capacity=Capacity.parse("64GiB"), path=str(folder), free_floor=ByteSize(0)
    )
    tier = nvme.open_tier(settings, CONTEXT)
    assert isinstance(tier, NvmeTier)
    return tier


def look_up(folder: Path, count: int) -> dict[str, float]:
    """Seconds to open and answer, bytes a block, microseconds a lookup."""
    present, absent = keys(count), keys(count, "absent")
    order = np.random.default_rng(1).permutation(count).tolist()
    present = [present[i] for i in order]
    gc.collect()
    before = memory("RssAnon")
    start = time.perf_counter()
    tier = open_tier(folder)
    found = tier.lookup([present[0], absent[0]])
    opened = time.perf_counter() - start
    assert found == [Presence.HIT, Presence.MISS]
    gc.collect()
    grown = memory("RssAnon") - before
    steps = []
    while tier.recovered:  # as an engine does between its steps, with all that it has found
        start = time.perf_counter()
        some, _ = tier.take_recovered(LOOKED_AT)
        tier.lookup(some)
        steps.append(time.perf_counter() - start)
    singles, batches, misses = [], [], []
    for _ in range(5):
        start = time.perf_counter()
        for key in present:
            tier.lookup([key])
        singles.append((time.perf_counter() - start) / count)
        start = time.perf_counter()
        hits = tier.lookup(present)
        batches.append((time.perf_counter() - start) / count)
        assert all(each is Presence.HIT for each in hits)
        start = time.perf_counter()
        tier.lookup(absent)
        misses.append((time.perf_counter() - start) / count)
    tier.close()
    return {
        "open": opened,
        "bytes": grown / count,
        "step": statistics.median(steps) * 1e6,
        "single": statistics.median(singles) * 1e6,
        "hit": statistics.median(batches) * 1e6,
        "miss": statistics.median(misses) * 1e6,
    }


def measure_catalogue(report: Report, folder: Path) -> None:
    """Run the two cases, each in fresh processes."""
    for count, name in ((100_000, "100k"), (1_000_000, "1M")):
        place = folder / name
        command = [sys.executable, "-m", "benchmarks.tiers.catalogue"]
        died = subprocess.run([*command, "write", str(place), str(count)], check=False)
        assert died.returncode == -signal.SIGKILL
        text = subprocess.run(
            [*command, "read", str(place), str(count)], check=True, capture_output=True
        ).stdout
        found = msgspec.json.decode(text, type=dict[str, float])
        if count == 1_000_000:
            report.at_most(f"{name} blocks, open after a crash", found["open"], "s", 1.0)
            report.at_most(f"{name} blocks, memory a block", found["bytes"], "B", 200)
            report.at_most(f"{name} blocks, a step that catches up", found["step"], "us", 500)
        else:
            report.add(f"{name} blocks, open after a crash", found["open"], "s")
            for what, label in (
                ("hit", "resident keys in batches"),
                ("miss", "absent keys in batches"),
                ("single", "resident keys one by one"),
            ):
                report.at_most(f"{name} blocks, lookup of {label}", found[what], "us", 1.0)


if __name__ == "__main__":
    what, where, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if what == "write":
        write_and_die(where, number)
    else:
        sys.stdout.buffer.write(msgspec.json.encode(look_up(where, number)))
