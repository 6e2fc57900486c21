"""Many jobs at once while records arrive, fail and change: one result each, no wrong bytes."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, World, keys_of
from support.device.fake_device import FakeDevice

from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cpu import CpuCopier
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.queue import DeviceCopier
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.slab import layout as table

PAGE, LAYERS, BLOCKS, SLOTS = 512, 2, 200, 64
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE


class Arrivals(threading.Thread):
    """The mover's part: finishes reserved slots that are being loaded, in random order."""

    def __init__(self, host: MemoryHost, seed: int) -> None:
        super().__init__(daemon=True)
        self._host = host
        self._random = random.Random(seed)
        self._lock = threading.Condition()
        self._due: list[int] = []
        self._over = False

    def expect(self, slots: list[int]) -> None:
        with self._lock:
            self._due += slots
            self._lock.notify_all()

    def stop(self) -> None:
        with self._lock:
            self._over = True
            self._lock.notify_all()
        self.join()

    def run(self) -> None:
        while True:
            with self._lock:
                while not self._due:
                    if self._over:
                        return
                    self._lock.wait()
                slot = self._due.pop(self._random.randrange(len(self._due)))
            failed = self._random.random() < 0.03
            state = table.FAILED if failed else table.ARRIVED
            self._host.entries[slot] = bytes([state]) + self._host.entries[slot][1:]


class Play:
    """Begins random jobs on free slots and blocks, and checks how each ended."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(seed)
        tensors = tuple(DeviceTensor(i * BLOCKS * PAGE, BLOCKS, PAGE, PAGE) for i in range(LAYERS))
        layout = DeviceLayout(tensors, (tuple(PageRef(i, PAGE) for i in range(LAYERS)),))
        memory = np.random.default_rng(seed).integers(0, 256, LAYERS * BLOCKS * PAGE, np.uint8)
        self.pages = memory.reshape(LAYERS, BLOCKS, PAGE)
        world = World(layout, memory)
        self.host = MemoryHost(layout, SLOTS)
        self.copier: DeviceCopier
        if kind == "cpu":
            self.copier = CpuCopier(RankRecords(layout, self.host, NAMESPACE), world.arrays())
        else:
            device = FakeDevice(seed, staging=3 if kind == "staged" else 0)
            self.copier = CudaCopier(RankRecords(world.addressed(), self.host, NAMESPACE), device)
        self.arrivals = Arrivals(self.host, seed)
        self.arrivals.start()
        self.keys = keys_of(SLOTS)
        self.contents: dict[int, bytes] = {}
        self.free_blocks, self.free_slots = set(range(BLOCKS)), set(range(SLOTS))
        self.running: dict[int, tuple[CopyJob, list[int], bool]] = {}
        self.ended: set[int] = set()

    def begin(self, name: int) -> None:
        rng = self.random
        stored = sorted(self.free_slots & self.contents.keys())
        loading = bool(stored) and rng.random() < 0.6
        usable = stored if loading else sorted(self.free_slots)
        slots = rng.sample(usable, min(len(usable), rng.randrange(1, 6)))
        blocks = rng.sample(sorted(self.free_blocks), len(slots))
        for slot in slots:
            self.host.put(slot, self.keys[slot], table.RESERVED, generation=name)
        flipped = loading and rng.random() < 0.05
        if flipped:
            self.host.record(slots[0])[4096 + rng.randrange(PAGE)] ^= 1
        if not loading:
            for slot, block in zip(slots, blocks, strict=True):
                self.contents[slot] = self.pages[:, block].tobytes()
        self.free_slots.difference_update(slots)
        self.free_blocks.difference_update(blocks)
        kind, keys = LOAD if loading else STORE, [self.keys[slot] for slot in slots]
        where = DeviceBlocks(np.array(blocks), [len(blocks)], [0])
        job = CopyJob(
            id=name, kind=kind, keys=keys, slots=slots, blocks=where, deadline=float("inf")
        )
        self.running[name] = (job, blocks, flipped)
        self.copier.jobs.submit(job)
        if loading:
            self.arrivals.expect(slots)

    def collect(self) -> None:
        for result in self.copier.jobs.poll():
            assert result.id not in self.ended, "one result a job"
            self.ended.add(result.id)
            self.check(result, *self.running.pop(result.id))

    def check(self, result: CopyResult, job: CopyJob, blocks: list[int], flipped: bool) -> None:
        if job.kind is STORE:
            assert result.ok
        else:
            for slot, block, outcome in zip(job.slots, blocks, result.outcomes, strict=True):
                if outcome.ok:
                    assert self.pages[:, block].tobytes() == self.contents[slot]
        if flipped:
            assert not result.outcomes[0].ok
        self.free_blocks.update(blocks)
        if result.ok:
            self.free_slots.update(job.slots)
        # Slots of a load that failed are left alone: what still arrives would be the next job's.


@pytest.mark.parametrize("kind", ["cpu", "streams", "staged"])
@pytest.mark.parametrize("seed", range(4))
def test_many_jobs_at_once(kind: str, seed: int) -> None:
    play = Play(kind, seed)
    for name in range(120):
        if len(play.free_slots) < 3:
            play.copier.jobs.wait(list(play.running))
            play.collect()
        if play.free_slots:
            play.begin(name)
        if play.random.random() < 0.5:
            play.collect()
    play.copier.jobs.wait(list(play.running))
    while play.running:
        play.collect()
    play.arrivals.stop()
    play.copier.close()
    assert play.copier.jobs.poll() == []
    assert len(play.ended) > 30
