"""KV tensors on a GPU, pinned host memory, a copier between them, and contestants in turns."""

from __future__ import annotations

import itertools
import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.device.copier import CopyJob
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.cuda.device import Cuda, CudaRegistrar
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef, cut
from kvtier.device.pinned import PinnedMemory, PinPlan
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import Buffer, record_bytes
from kvtier.slab import layout as table
from kvtier.types import BlockKey, block_key

LAYERS = 32
RECORD_BYTES = 16 << 20
"""About what a chunk of 256 tokens has, on one rank of a model of the common size."""
NAMESPACE = bytes(16)
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE


class Host:
    """A region of slots."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._map = mmap.mmap(-1, slots * slot_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._slot_bytes = slot_bytes
        self.data = memoryview(self._map)
        self.entries = [bytes(table.ENTRY_BYTES)] * slots

    def record(self, slot: int) -> Buffer:
        return self.data[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def state(self, slot: int) -> int:
        return self.entries[slot][0]

    def entry(self, slot: int) -> bytes:
        return self.entries[slot]

    def entries_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        return np.frombuffer(b"".join([self.entries[slot] for slot in slots]), table.ENTRY_DTYPE)


def chunk_of(page: int) -> int:
    """How many blocks of 32 layers of such pages make a record of the usual size."""
    return max(1, min(16, RECORD_BYTES // (LAYERS * page)))


def even_layout(torch: Any, page: int, blocks: int, per_chunk: int) -> tuple[Any, DeviceLayout]:
    """One group, as many layers, all pages alike."""
    shape = (LAYERS, blocks, page)
    pool = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
    tensors = tuple(
        DeviceTensor(pool[layer].data_ptr(), blocks, page, page) for layer in range(LAYERS)
    )
    refs = tuple(PageRef(layer, page) for layer in range(LAYERS))
    return pool, DeviceLayout(tensors, (refs,), per_chunk)


class Unstaged(Cuda):
    """A device without buffers to spare: pages are copied one by one, and proved by the host."""

    def stages(self, *arguments: object, **options: object) -> list[Any]:
        raise RuntimeError("the benchmark wants none")


class Arena:
    """A copier between the tensors of a layout and pinned memory for `records` records."""

    def __init__(
        self,
        torch: Any,
        pool: Any,
        layout: DeviceLayout,
        records: int,
        device: Cuda | None = None,
    ) -> None:
        self.torch, self.pool, self.layout, self.records = torch, pool, layout, records
        self.count = records * layout.blocks_per_chunk
        self.bytes = records * layout.part_bytes[0]
        self.host = Host(records, record_bytes(max(layout.part_bytes)))
        slot_bytes = len(self.host.record(0))
        device = device or Cuda(0)
        memory = PinnedMemory(self.host.data, slot_bytes, CudaRegistrar(device.cudart), PinPlan())
        self.copier = CudaCopier(RankRecords(layout, self.host, NAMESPACE), device, memory=memory)
        assert self.copier.prepared.wait(120), "pinning the region takes too long"
        self._names = itertools.count()
        self._finished: set[int] = set()
        self._random = np.random.default_rng(0)

    @classmethod
    def even(cls, torch: Any, page: int, size: int, device: Cuda | None = None) -> Arena:
        """For records of one group with about `size` bytes in all, and twice as many blocks."""
        per_chunk = chunk_of(page)
        records = max(2, size // (LAYERS * page * per_chunk))
        pool, layout = even_layout(torch, page, 2 * records * per_chunk, per_chunk)
        return cls(torch, pool, layout, records, device)

    def shuffled(self) -> DeviceBlocks:
        """Blocks in an order that leaves no neighbours to merge."""
        ids = self._random.permutation(self.layout.blocks[0])[: self.count]
        return DeviceBlocks(ids, [self.count], [0])

    def keys(self, blocks: DeviceBlocks) -> list[BlockKey]:
        """A name for every record that a job has."""
        groups = cut(self.layout, blocks).groups
        return [block_key(at.to_bytes(8, "big"), group) for at, group in enumerate(groups)]

    def submit(self, kind: TransferKind, slots: range, blocks: DeviceBlocks) -> int:
        keys = self.keys(blocks)
        state = table.VALID if kind is LOAD else table.RESERVED
        for slot, key in zip(slots, keys, strict=True):
            self.host.entries[slot] = table.pack_entries(state, [key], 1, 0)
        name = next(self._names)
        job = CopyJob(
            id=name, kind=kind, keys=keys, slots=slots, blocks=blocks, deadline=float("inf")
        )
        self.copier.jobs.submit(job)
        return name

    def finish(self, names: Iterable[int]) -> None:
        """Wait for jobs to be complete, sealing included."""
        waiting = set(names)
        while not self.finished(waiting):
            time.sleep(0.0002)
        self._finished -= waiting

    def finished(self, names: set[int]) -> bool:
        """Whether these jobs are complete."""
        return self.ended(names) == len(names)

    def ended(self, names: set[int]) -> int:
        """How many of these jobs are complete."""
        for result in self.copier.jobs.poll():
            assert result.ok, result.outcomes
            self._finished.add(result.id)
        return len(names & self._finished)

    def move(self, kind: TransferKind, blocks: DeviceBlocks) -> None:
        self.finish([self.submit(kind, range(len(cut(self.layout, blocks))), blocks)])

    def close(self) -> None:
        self.copier.close()
        self.pool = None
        self.torch.cuda.empty_cache()


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turns(contestants: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Median seconds of each contestant; the first turn warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, action in contestants.items():
            taken = seconds_of(action)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}
