"""Who looks out for what is still arriving: each look takes time from the engine's thread."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of
from support.device.fake_device import FakeDevice

from kvtier.device.copier import CopyJob
from kvtier.device.cpu import CpuCopier
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.queue import GIL_KEPT_S, DeviceCopier, JobQueue
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.slab import layout as table

PAGE, ROWS, LOOKS = 512, 8, 60
HANGS_S = 60


class Watched(MemoryHost):
    """Notes who looks at slots, and which were found to have arrived."""

    def __init__(self, layout: DeviceLayout) -> None:
        super().__init__(layout, ROWS)
        self.looked: list[int] = []
        self.often = threading.Event()
        self.begun = [threading.Event() for _ in range(ROWS)]

    def forget(self) -> None:
        for each in self.begun:
            each.clear()

    def state(self, slot: int) -> int:
        self.looked.append(threading.get_ident())
        if len(self.looked) >= LOOKS * ROWS:
            self.often.set()
        return super().state(slot)

    def entry(self, slot: int) -> bytes:
        self.begun[slot].set()
        return super().entry(slot)


class Setting:
    """A load of records none of which has arrived; to host memory (None), or a device with so many
    buffers."""

    def __init__(self, staging: int | None) -> None:
        self.pool = np.zeros((ROWS, PAGE), np.uint8)
        tensor = DeviceTensor(int(self.pool.ctypes.data), ROWS, PAGE, PAGE)
        self.layout = DeviceLayout((tensor,), ((PageRef(0, PAGE),),))
        self.host = Watched(self.layout)
        self.device = FakeDevice(staging=staging or 0)
        self.copier: DeviceCopier
        if staging is None:
            self.copier = CpuCopier(RankRecords(self.layout, self.host, NAMESPACE), [self.pool])
        else:
            self.copier = CudaCopier(RankRecords(self.layout, self.host, NAMESPACE), self.device)
            assert self.copier.prepared.wait(HANGS_S)
        self.keys = keys_of(ROWS)
        self._submit(TransferKind.STORE)
        while not self.copier.jobs.poll():
            self.copier.jobs.wait([0])
        self.host.forget()
        self._submit(TransferKind.LOAD)

    def _submit(self, kind: TransferKind) -> None:
        """All records, which are reserved, or still arriving."""
        for slot, key in enumerate(self.keys):
            self.host.put(slot, key, table.RESERVED)
        self.copier.jobs.submit(
            CopyJob(
                id=0,
                kind=kind,
                keys=self.keys,
                slots=list(range(ROWS)),
                blocks=DeviceBlocks(np.arange(ROWS), [ROWS], [0]),
                deadline=float("inf"),
            )
        )

    def arrive(self, slot: int) -> None:
        self.host.put(slot, self.keys[slot], table.VALID)


@pytest.mark.parametrize("staging", [None, 0, 4])
def test_one_thread_looks_out_for_all(staging: int | None) -> None:
    setting = Setting(staging)
    assert setting.host.often.wait(HANGS_S)
    end, lately = time.monotonic() + HANGS_S, LOOKS * ROWS // 2
    while len(set(setting.host.looked[-lately:])) > 1:  # a thread that wakes late looks once
        assert time.monotonic() < end
    setting.copier.close()


@pytest.mark.parametrize("staging", [0, 4])
def test_while_that_one_is_busy_another_looks_out(staging: int) -> None:
    setting = Setting(staging)
    setting.device.freeze(*setting.device.lanes[True])
    for slot in range(4):
        assert not setting.host.begun[slot].is_set()
        setting.arrive(slot)
        assert setting.host.begun[slot].wait(HANGS_S)
    setting.device.thaw(*setting.device.lanes[True])
    setting.copier.close()


def test_a_long_load_is_looked_at_less_often_but_is_not_much_longer_for_that() -> None:
    tensor = DeviceTensor(0, ROWS, PAGE, PAGE)
    layout = DeviceLayout((tensor,), ((PageRef(0, PAGE),),))
    host = MemoryHost(layout, ROWS)
    job_queue = JobQueue(RankRecords(layout, host, NAMESPACE), 1)
    pauses = [job_queue.pause(waited) for waited in (0.0, 0.03, 0.064, 0.1, 60.0)]
    assert pauses == pytest.approx([0.001, 0.001, 0.002, 0.1 / 32, 0.004])


def test_an_engine_that_is_busy_in_python_lets_a_copier_have_the_lock_soon() -> None:
    usual = sys.getswitchinterval()
    try:
        for before, after in ((5e-3, GIL_KEPT_S), (1e-5, 1e-5)):
            sys.setswitchinterval(before)
            Setting(4).copier.close()
            assert sys.getswitchinterval() == pytest.approx(after)
    finally:
        sys.setswitchinterval(usual)
