"""What is special about KV tensors in host memory: strided copies, and stores that give way."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, World, keys_of
from support.device.direct_engine import Tensor

from kvtier.device import cpu as cpu_copier
from kvtier.device.copier import CopyJob
from kvtier.device.cpu import CpuCopier, host_arrays
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.queue import JobQueue
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES
from kvtier.slab import layout as table
from kvtier.types import Outcome

PAGE = 4096


def a_world() -> World:
    tensors = tuple(DeviceTensor(layer << 20, 32, PAGE, PAGE) for layer in range(3))
    groups = (tuple(PageRef(layer, PAGE) for layer in range(3)),)
    memory = np.random.default_rng(1).integers(0, 256, 4 << 20, dtype=np.uint8)
    return World(DeviceLayout(tensors, groups), memory)


def job_of(kind: TransferKind, name: int, slots: list[int], keys: list[Any], at: int) -> CopyJob:
    blocks = DeviceBlocks(np.arange(at, at + len(slots)), [len(slots)], [0])
    return CopyJob(id=name, kind=kind, keys=keys, slots=slots, blocks=blocks, deadline=float("inf"))


class Gate(MemoryHost):
    """Holds whoever touches one slot until it is opened."""

    slot = -1

    def __init__(self, layout: DeviceLayout, slots: int) -> None:
        super().__init__(layout, slots)
        self.reached, self.open, self.order = threading.Event(), threading.Event(), list[int]()

    def record(self, slot: int) -> memoryview:
        self._touch(slot)
        return super().record(slot)

    def entries_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        for slot in slots.tolist():
            self._touch(slot)
        return super().entries_of(slots)

    def _touch(self, slot: int) -> None:
        if slot not in self.order:
            self.order.append(slot)
        if slot == self.slot:
            self.reached.set()
            self.open.wait()


def test_stores_let_loads_go_first(monkeypatch: Any) -> None:
    """A store of three records is at its first when a load arrives: that is next."""
    monkeypatch.setattr(CpuCopier, "_BATCH_BYTES", 1)
    world = a_world()
    host = Gate(world.layout, 8)
    keys = keys_of(5)
    copier = CpuCopier(RankRecords(world.layout, host, NAMESPACE), world.arrays(), load_threads=1)
    for slot in (0, 1):
        host.put(slot, keys[slot], table.RESERVED)
    copier.jobs.submit(job_of(TransferKind.STORE, 1, [0, 1], keys[:2], 0))
    copier.jobs.wait([1])
    for slot in (0, 1):
        host.put(slot, keys[slot], table.VALID)
    for slot in (2, 3, 4):
        host.put(slot, keys[slot], table.RESERVED)
    host.order.clear()
    host.slot = 2
    copier.jobs.submit(job_of(TransferKind.STORE, 2, [2, 3, 4], keys[2:], 8))
    host.reached.wait()
    copier.jobs.submit(job_of(TransferKind.LOAD, 3, [0, 1], keys[:2], 16))
    copier.jobs.wait([3])
    assert host.order == [2, 0, 1]
    host.open.set()
    copier.jobs.wait([2])
    assert host.order == [2, 0, 1, 3, 4]
    assert all(result.ok for result in copier.jobs.poll())
    copier.close()


def test_a_store_that_the_engine_waits_for_goes_before_loads_and_other_stores() -> None:
    world = a_world()
    host = MemoryHost(world.layout, 8)
    keys = keys_of(5)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.VALID if slot < 2 else table.RESERVED)
    job_queue = JobQueue(RankRecords(world.layout, host, NAMESPACE), 1)
    job_queue.submit(job_of(TransferKind.LOAD, 1, [0, 1], keys[:2], 0))
    job_queue.submit(job_of(TransferKind.STORE, 2, [2, 3], keys[2:4], 8))
    job_queue.submit(job_of(TransferKind.STORE, 3, [4], keys[4:], 16))
    assert job_queue.next(job_queue.store_after_loads, wait=False) is None
    engine = threading.Thread(target=job_queue.wait, args=([3],))
    engine.start()
    batch = job_queue.next(job_queue.store_after_loads)
    assert batch is not None
    assert batch.work.job.id == 3
    job_queue.finish(batch, [Outcome.OK])
    engine.join()
    assert job_queue.next(job_queue.store_after_loads, wait=False) is None


def test_two_threads_share_a_load_in_few_batches() -> None:
    """Each takes half of what is left, of at most four batches' bytes and at least one's."""
    world = a_world()
    host, keys = MemoryHost(world.layout, 32), keys_of(32)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.VALID)
    unit = 3 * world.layout.part_bytes[0]
    prover = RankRecords(world.layout, host, NAMESPACE)
    for sharers, expected in ((2, [12, 10, 5, 3, 2]), (0, [3] * 10 + [2])):
        job_queue = JobQueue(prover, unit, sharers=sharers)
        job_queue.submit(job_of(TransferKind.LOAD, 1, list(range(32)), keys, 0))
        sizes = []
        while batch := job_queue.next(job_queue.load, wait=False):
            sizes.append(len(batch.rows))
        assert sizes == expected


@pytest.mark.parametrize("at", [20, HEADER_BYTES, HEADER_BYTES + 3 * PAGE - 1])
def test_a_bit_that_flipped_is_found_in_what_is_copied_in_strips(monkeypatch: Any, at: int) -> None:
    monkeypatch.setattr(cpu_copier, "_STRIP_BYTES", PAGE)
    world = a_world()
    host, keys = MemoryHost(world.layout, 2), keys_of(2)
    copier = CpuCopier(RankRecords(world.layout, host, NAMESPACE), world.arrays())
    for state in (table.RESERVED, table.VALID):
        for slot, key in enumerate(keys):
            host.put(slot, key, state)
        if state == table.RESERVED:
            copier.jobs.submit(job_of(TransferKind.STORE, 1, [0, 1], keys, 0))
            copier.jobs.wait([1])
    assert [result.ok for result in copier.jobs.poll()] == [True]
    host.record(1)[at] ^= 1
    copier.jobs.submit(job_of(TransferKind.LOAD, 2, [0, 1], keys, 16))
    copier.jobs.wait([2])
    copier.close()
    (result,) = copier.jobs.poll()
    assert result.outcomes == [Outcome.OK, Outcome.CORRUPT]


def test_a_layout_is_read_from_canonical_caches() -> None:
    """A packed tensor of two layers, the second of which has padded pages; two groups share it."""
    memory = np.arange(8 * 96, dtype=np.int64).astype(np.int8).reshape(8, 96)
    caches = SimpleNamespace(
        tensors=[
            SimpleNamespace(tensor=Tensor(memory[:, :32]), page_size_bytes=32),
            SimpleNamespace(tensor=Tensor(memory[:, 32:]), page_size_bytes=64),
        ],
        group_data_refs=[
            [
                SimpleNamespace(tensor_idx=0, page_size_bytes=32),
                SimpleNamespace(tensor_idx=1, page_size_bytes=60),
            ],
            [SimpleNamespace(tensor_idx=1, page_size_bytes=64)],
        ],
    )
    layout = DeviceLayout.of_caches(caches, 2)
    at = memory.ctypes.data
    assert layout.tensors == (DeviceTensor(at, 8, 96, 32), DeviceTensor(at + 32, 8, 96, 64))
    assert layout.groups == ((PageRef(0, 32), PageRef(1, 60)), (PageRef(1, 64),))
    assert layout.group_bytes == (184, 128)
    first, second = host_arrays(caches)
    second[3, 0] = 7
    assert memory[3, 32] == 7, "arrays are views"
    assert first.dtype == np.uint8
