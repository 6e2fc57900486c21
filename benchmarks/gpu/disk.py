"""From a local disk to the GPU: through pinned slots while they fill, and around them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.arena import LAYERS, chunk_of, even_layout, in_turns
from benchmarks.report import Report
from kvtier.backends.cpu import BACKEND as CPU
from kvtier.backends.cpu import CpuHandler, CpuSettings
from kvtier.backends.nvme import BACKEND as NVME
from kvtier.backends.nvme import NvmeSettings
from kvtier.chain.context import ChainContext
from kvtier.chain.tier_chain import TierChain
from kvtier.device.copier import CopyJob
from kvtier.device.cuda.device import open_copier
from kvtier.device.direct import DirectAccess, KvikioDriver, probe
from kvtier.device.layout import DeviceBlocks
from kvtier.interfaces.backend import TierContext
from kvtier.interfaces.mover import TransferKind
from kvtier.move.threads import ThreadMover
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, Gds
from kvtier.testing.subject import SHARED, make_memory_folder
from kvtier.types import Namespace, block_key

DISK_BYTES = 1 << 30
PAGE = 64 << 10
SECONDS_MAX = 60.0


class DiskArena:
    """A chain of a CPU region and a folder on disk, and a copier on the region."""

    def __init__(self, torch: Any, folder: Path, records: int, gds: Gds) -> None:
        self.torch, self.records = torch, records
        self.per_chunk = chunk_of(PAGE)
        count = records * self.per_chunk
        self.pool, layout = even_layout(torch, PAGE, 2 * count, self.per_chunk)
        self.bytes = records * layout.part_bytes[0]
        namespace = Namespace(facts={"model": "benchmark"}, group_bytes=layout.group_bytes)
        slots = records * record_bytes(namespace.payload_bytes)
        self._memory = make_memory_folder("bench", _memory(2 * slots))
        room = Capacity(size=ByteSize(slots + (64 << 20)))
        cpu = CpuSettings(capacity=room, path=str(self._memory), name="bench")
        nvme = NvmeSettings(
            capacity=Capacity(size=ByteSize(2 * slots + (256 << 20))),
            path=str(folder / "nvme"),
            free_floor=ByteSize(0),
        )
        context = TierContext(namespace, "bench")
        self.tiers = [CPU.open_tier(cpu, context), NVME.open_tier(nvme, context)]
        self.host = CPU.open_handler(cpu, context)
        handlers = [CPU.open_handler(cpu, context), NVME.open_handler(nvme, context)]
        self.mover = ThreadMover(handlers, namespace, queue_blocks=[4096, 4096])
        self.chain = TierChain(ChainContext(self.tiers, [cpu, nvme], self.mover, namespace))
        assert isinstance(self.host, CpuHandler)
        region = self.host.region
        access = DirectAccess(gds, [folder], probe, lambda: KvikioDriver(0))
        self.copier = open_copier(
            layout,
            region,
            namespace.digest,
            index=0,
            open_direct=lambda: access.open(layout, namespace.digest),
        )
        assert self.copier.prepared.wait(SECONDS_MAX), "pinning the region takes too long"
        self.keys = [block_key(at.to_bytes(8, "big")) for at in range(records)]
        ids = np.random.default_rng(0).permutation(2 * count)
        self.away, self.back = (
            DeviceBlocks(mine, [count], [0]) for mine in (ids[:count], ids[count:])
        )

    def fill(self) -> None:
        """All records on disk."""
        taken = self.chain.prepare_store(self.keys)
        assert taken.keys == self.keys
        self._copy(TransferKind.STORE, taken.spec, self.away)
        self.chain.complete_store(self.keys)
        while self.chain.has_pending_work:
            self.mover.wait(0.01)
            self.chain.poll()
        blocks = sum(tier.stats().blocks for tier in self.tiers)
        assert blocks == 2 * self.records, "the disk did not take everything"

    def _copy(self, kind: TransferKind, spec: Any, blocks: DeviceBlocks, files: Any = None) -> None:
        slots: Sequence[int] = spec.slots if files is None else [-1] * self.records
        end = time.monotonic() + SECONDS_MAX
        job = CopyJob(
            id=0,
            kind=kind,
            keys=self.keys,
            slots=slots,
            blocks=blocks,
            deadline=end,
            files=files or {},
        )
        self.copier.jobs.submit(job)
        while not (results := self.copier.jobs.poll()):
            self.chain.poll()
            time.sleep(0.0002)
            assert time.monotonic() < end + 5, "the copier is stuck"
        assert results[0].ok, results[0].outcomes

    def lose_memory(self) -> None:
        self.tiers[0].forget(self.keys)
        self.chain.poll()

    def from_disk(self) -> None:
        """Into the region alone."""
        self.lose_memory()
        ticket = self.chain.begin_load(self.keys, "r", time.monotonic() + SECONDS_MAX)
        while not ticket.landed:
            self.mover.wait(0.001)
            self.chain.poll()
        assert not ticket.failed
        self.chain.end_load(ticket)

    def to_device(self) -> None:
        """From the region alone."""
        self._load()

    def one_hop(self) -> None:
        """Both at once."""
        self.lose_memory()
        self._load()

    def direct(self) -> None:
        """From disk around the region."""
        self.lose_memory()
        self.chain.read_directly(True)
        self._load()
        self.chain.read_directly(False)  # which forgets that these have been used once

    def _load(self) -> None:
        ticket = self.chain.begin_load(self.keys, "r", time.monotonic() + SECONDS_MAX)
        files = {at: ticket.files[key] for at, key in enumerate(self.keys) if key in ticket.files}
        assert not ticket.missing
        self._copy(TransferKind.LOAD, ticket.spec, self.back, files or None)
        self.chain.end_load(ticket)

    def right(self) -> bool:
        """Whether what was loaded is what was stored."""
        away, back = (self.torch.from_numpy(each.ids).cuda() for each in (self.away, self.back))
        return bool((self.pool[:, away] == self.pool[:, back]).all())

    def close(self) -> None:
        self.copier.close()
        self.mover.close()
        self.chain.close()
        self.host.close()
        shutil.rmtree(self._memory, ignore_errors=True)


def _memory(size: int) -> Path:
    """Shared memory, if it has room; else wherever temporary files go."""
    return SHARED if shutil.disk_usage(SHARED).free > size else Path(tempfile.gettempdir())


def one_hop(torch: Any, report: Report, folder: Path) -> None:
    """Disk to GPU in one hop, beside its two halves; and directly, or why not."""
    with tempfile.TemporaryDirectory(prefix=".kvtier-bench-", dir=folder) as place:
        reason = probe(Path(place))
        print(f"GPUDirect Storage: {reason or 'works here'}", flush=True)
        report.add(f"GPUDirect Storage: {reason or 'works here'}", float(reason is None), "")
        gds = Gds.OFF if reason else Gds.REQUIRE
        records = max(2, DISK_BYTES // (LAYERS * PAGE * chunk_of(PAGE)))
        arena = DiskArena(torch, Path(place), records, gds)
        try:
            arena.fill()
            contestants = {
                "disk to slots": arena.from_disk,
                "slots to GPU": arena.to_device,
                "disk to GPU in one hop": arena.one_hop,
            }
            if reason is None:
                contestants["disk to GPU directly"] = arena.direct
            times = in_turns(contestants, 3)
            assert arena.right(), "what came from the disk is not what went there"
        finally:
            arena.close()
    for name, taken in times.items():
        report.add(name, arena.bytes / taken / 1e9, "GB/s")
    halves = times["disk to slots"], times["slots to GPU"]
    hop = times["disk to GPU in one hop"]
    report.at_most("one hop, of the sum of its halves", hop / sum(halves), "", 1.0)
    report.add("one hop, of the longer half", hop / max(halves), "")
