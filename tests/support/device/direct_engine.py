"""An engine of two ranks without vLLM: manager, workers, a stack on real files, fake devices."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.backends.cpu import Region
from kvtier.cost.model import CostModel
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.direct import DirectLoader
from kvtier.device.layout import DeviceBlocks, DeviceLayout
from kvtier.device.queue import DeviceCopier
from kvtier.device.records import RankRecords
from kvtier.interfaces.handler import HostRegion
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import record_bytes
from kvtier.stack import Stack
from kvtier.types import BlockKey, Namespace, Outcome
from kvtier.vllm.protocol import Report, WorkerJob
from kvtier.vllm.worker import RankShare, RankWorker
from support.device.fake_cufile import FakeCufile
from support.device.fake_device import FakeDevice
from support.scheduler.asking import AddingManager

RANKS, LAYERS, PAGE, BLOCKS = 2, 3, 2048, 256
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE
PART = LAYERS * PAGE
NAMESPACE = Namespace(facts={"model": "none"}, group_bytes=(RANKS * PART,), parts=RANKS)
SLOT = record_bytes(RANKS * PART)


class Tensor:
    """As much of a torch tensor of pages as a layout asks for."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = array.shape

    def numpy(self) -> Any:
        return self._array

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def element_size(self) -> int:
        return 1

    def stride(self, axis: int) -> int:
        return int(self._array.strides[axis])


class Rank:
    """One rank's device and worker."""

    def __init__(self, rank: int, *, able: bool) -> None:
        self.pages = np.zeros((LAYERS, BLOCKS, PAGE), np.uint8)
        self.device, self.driver = FakeDevice(rank), FakeCufile()
        self._able = able
        caches = SimpleNamespace(
            tensors=[
                SimpleNamespace(tensor=Tensor(layer), page_size_bytes=PAGE) for layer in self.pages
            ],
            group_data_refs=[
                [SimpleNamespace(tensor_idx=i, page_size_bytes=PAGE) for i in range(LAYERS)]
            ],
        )
        self.worker = RankWorker(
            caches,
            RankShare(rank, RANKS, blocks_per_chunk=1, group_ids=(0,)),
            attach=Region.attach,
            open_copier=self._open_copier,
        )

    def _open_copier(
        self, layout: DeviceLayout, region: HostRegion, namespace: bytes
    ) -> DeviceCopier:
        def open_direct() -> DirectLoader | None:
            loader = DirectLoader(layout, self.driver, namespace, stages=3)
            return loader if self._able else None

        return CudaCopier(
            RankRecords(layout, region, namespace), self.device, open_direct=open_direct
        )

    def wait_until_open(self) -> None:
        """Until the copier's own thread has found out whether files can be read directly."""
        copier = self.worker._copier
        assert copier is not None
        end = time.monotonic() + 60
        while self._able and not copier.reads_files:
            assert time.monotonic() < end, "direct reads never became possible"
            os.sched_yield()


class Engine:
    """Stores and loads blocks as vLLM would have it done."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "one",
        cpu_slots: int = 64,
        nvme_slots: int = 128,
        able: Sequence[bool] = (True, True),
        costs: CostModel | None = None,
    ) -> None:
        config = {
            "version": 1,
            "name": name,
            "load_policy": "always",
            "mover": {"mode": "threads"},
            "tiers": [
                {"kind": "cpu", "path": str(folder), "capacity": (cpu_slots + 1) * (SLOT + 128)},
                {
                    "kind": "nvme",
                    "path": str(folder / "nvme"),
                    "capacity": (nvme_slots + 8) * (SLOT + 64) + (1 << 16),
                    "free_floor": 0,
                },
            ],
        }
        self.stack = Stack.open(config, NAMESPACE, costs=costs)
        region = str(self.stack.host.region.path)  # type: ignore[attr-defined]
        self.manager = AddingManager(self.stack, region=region, ranks=RANKS, costs=costs)
        self.chain = self.stack.chain
        self.cpu, self.nvme = self.chain.tiers
        self.ranks = [Rank(rank, able=each) for rank, each in enumerate(able)]
        self._names = itertools.count(1)
        self.contents: dict[BlockKey, list[bytes]] = {}
        self.failed: list[str] = []

    def store(self, keys: Sequence[BlockKey], first: int = 0) -> None:
        """Random bytes for these keys, out of the devices and down to the disk."""
        taken, worker_job = self.manager.prepare_store(keys, "storing")
        assert len(taken) == len(keys)
        ids = np.arange(first, first + len(keys))
        for rank in self.ranks:
            random = np.random.default_rng(abs(hash((keys[0], rank.worker._share.part))))
            rank.pages[:, ids] = random.integers(0, 256, (LAYERS, len(keys), PAGE), np.uint8)
        for index, key in enumerate(keys):
            self.contents[key] = [rank.pages[:, ids[index]].tobytes() for rank in self.ranks]
        job = next(self._names)
        for rank in self.ranks:
            rank.worker.begin(STORE, job, worker_job, DeviceBlocks(ids, [len(ids)], [0]))
        for rank in self.ranks:
            rank.wait_until_open()  # what the reports of this store then say is for certain
        self.finish(worker_job)
        self.settle()

    def store_alone(self, keys: Sequence[BlockKey]) -> None:
        """Blocks of nobody's device: only to need room."""
        self.stack.store({key: bytes(RANKS * PART) for key in keys})
        self.settle()

    def settle(self) -> None:
        assert self.stack.settle(), "the cascade has an end"

    def forget_memory(self, keys: Sequence[BlockKey]) -> None:
        """Only the disk holds these now."""
        self.cpu.forget(keys)

    def begin(self, keys: Sequence[BlockKey], first: int = 100, request: str = "r") -> WorkerJob:
        return self.begin_with(self.manager.prepare_load(keys, request), first)

    def begin_with(self, worker_job: WorkerJob, first: int = 100) -> WorkerJob:
        job = next(self._names)
        ids = np.arange(first, first + len(worker_job.keys))
        for rank in self.ranks:
            rank.pages[:, ids] = 0
            rank.worker.begin(LOAD, job, worker_job, DeviceBlocks(ids, [len(ids)], [0]))
        return worker_job

    def finish(self, worker_job: WorkerJob) -> dict[int, Outcome]:
        """Step until all ranks have reported; what failed, by position."""
        left, merged = RANKS, Report(0)
        while left:
            self.chain.poll()
            for rank in self.ranks:
                for ended in rank.worker.poll():
                    assert ended.number == worker_job.number
                    left -= 1
                    merged = merged.merge(ended.report)
                    request = self.manager.report(ended.number, ended.report)
                    self.failed += [request] if request else []
        return merged.failures

    def load(self, keys: Sequence[BlockKey], first: int = 100) -> WorkerJob:
        """Load, and compare every byte of every rank."""
        worker_job = self.begin(keys, first)
        assert self.finish(worker_job) == {}
        self.compare(keys, first)
        return worker_job

    def compare(self, keys: Sequence[BlockKey], first: int = 100) -> None:
        for index, key in enumerate(keys):
            found = [rank.pages[:, first + index].tobytes() for rank in self.ranks]
            assert found == self.contents[key], f"block {index}"

    def hang(self, hangs: bool) -> None:
        for rank in self.ranks:
            rank.driver.hangs = hangs

    def close(self) -> None:
        self.hang(False)
        for rank in self.ranks:
            rank.worker.close()
        self.manager.close()
