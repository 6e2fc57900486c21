"""A device with streams: nothing is copied too early, and nobody waits who must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, World, keys_of
from support.device.fake_device import FakeDevice, FakeMemory, FakeStage

from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.queue import JobQueue
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.slab import layout as table
from kvtier.types import BlockKey, Outcome

PAGE = 4096
RECORDS = 6
LAYOUT = DeviceLayout((DeviceTensor(0, 32, PAGE, PAGE),), ((PageRef(0, PAGE),),))
LOAD, STORE = TransferKind.LOAD, TransferKind.STORE


def records_of(memory: Any, host: MemoryHost) -> RankRecords:
    return RankRecords(World(LAYOUT, memory).addressed(), host, NAMESPACE)


class Stage(NamedTuple):
    """A copier on a fake device; record `i` belongs to block `i`."""

    copier: CudaCopier
    device: FakeDevice
    host: MemoryHost
    memory: Any
    keys: list[BlockKey]

    def page(self, block: int) -> Any:
        return self.memory[block * PAGE : (block + 1) * PAGE]

    def submit(
        self,
        kind: TransferKind,
        name: int,
        first: int,
        count: int,
        onto: int,
        mark: object = None,
    ) -> None:
        state = table.VALID if kind is LOAD else table.RESERVED
        slots = list(range(first, first + count))
        for slot in slots:
            self.host.put(slot, self.keys[slot], state)
        blocks = DeviceBlocks(np.arange(onto, onto + count), [count], [0])
        keys = self.keys[first : first + count]
        job = CopyJob(
            id=name, kind=kind, keys=keys, slots=slots, blocks=blocks, deadline=float("inf")
        )
        self.copier.jobs.submit(job, mark)

    def result(self, name: int) -> CopyResult:
        self.copier.jobs.wait([name])
        while True:
            for result in self.copier.jobs.poll():
                if result.id == name:
                    return result


@pytest.fixture(params=[(seed, staging) for seed in range(4) for staging in (0, 2)], ids=str)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The device's seed is a parameter: other orders of what may be reordered. The other one is how
    many buffers it has to stage records in."""
    memory = np.random.default_rng(1).integers(0, 256, 32 * PAGE, dtype=np.uint8)
    device, host = FakeDevice(*request.param), MemoryHost(LAYOUT, RECORDS)
    copier = CudaCopier(records_of(memory, host), device)
    assert copier.prepared.wait(60)
    stage = Stage(copier, device, host, memory, keys_of(RECORDS))
    yield stage
    device.thaw(device.engine, *device.lanes[True], *device.lanes[False])
    copier.close()


def stored(stage: Stage) -> None:
    """All records hold their blocks."""
    stage.submit(STORE, 0, 0, RECORDS, 0)
    assert stage.result(0).ok


def test_a_store_waits_for_what_the_engine_writes(stage: Stage) -> None:
    stage.device.freeze(stage.device.engine)
    stage.device.engine.do(lambda: stage.page(2).fill(42))
    stage.submit(STORE, 1, 2, 1, 2)
    stage.device.engine.do(lambda: stage.page(2).fill(43))
    while not stage.device.waiters:
        pass  # the copier has not got there
    stage.device.drain()
    assert not any(stage.host.record(2)[4096:]), "nothing was copied before its time"
    stage.device.freeze(*stage.device.lanes[False])
    stage.device.thaw(stage.device.engine)
    stage.device.drain()
    stage.page(2).fill(42)
    stage.device.thaw(*stage.device.lanes[False])
    assert stage.result(1).ok
    assert set(stage.host.record(2)[4096 : 4096 + PAGE]) == {42}


def test_what_leaves_the_device_after_the_engine_has_gone_on_is_not_stored(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that hangs has the engine wait for a while, and copies what it wrote after that."""
    stored(stage)
    stage.device.waiters.clear()
    stage.device.freeze(*stage.device.lanes[False])
    stage.submit(STORE, 1, 2, 1, 2)
    while not stage.device.waiters:
        pass  # the copier has not got there
    with monkeypatch.context() as patch:
        patch.setattr(JobQueue, "_WAIT_S", 0.0)
        stage.copier.jobs.wait([1])
    stage.page(2).fill(42)
    assert stage.copier.jobs.poll() == []
    stage.device.thaw(*stage.device.lanes[False])
    assert stage.result(1).outcomes == [Outcome.DROPPED]


def test_a_load_waits_for_what_the_engine_writes_there(stage: Stage) -> None:
    """An engine may still zero the blocks that it gives to a load."""
    stored(stage)
    wanted = stage.page(1).copy()
    stage.device.freeze(stage.device.engine)
    stage.device.engine.do(lambda: stage.page(20).fill(0))
    stage.submit(LOAD, 1, 1, 1, 20)
    stage.device.drain()
    assert stage.copier.jobs.poll() == []
    stage.device.thaw(stage.device.engine)
    assert stage.result(1).ok
    assert (stage.page(20) == wanted).all()


def test_a_load_need_not_wait_for_what_comes_after_its_mark(stage: Stage) -> None:
    stored(stage)
    wanted = stage.page(1).copy()
    stage.device.engine.do(lambda: stage.page(20).fill(0))
    mark = stage.copier.jobs.mark()
    stage.device.drain()
    stage.device.freeze(stage.device.engine)
    stage.device.engine.do(lambda: None)  # a step of the model, which is long
    stage.submit(LOAD, 1, 1, 1, 20, mark)
    assert stage.result(1).ok
    assert (stage.page(20) == wanted).all()


def test_what_the_engine_reads_after_a_result_is_there(stage: Stage) -> None:
    stored(stage)
    seen: list[bytes] = []
    stage.submit(LOAD, 1, 0, RECORDS, 20)
    assert stage.result(1).ok
    stage.device.engine.do(lambda: seen.append(bytes(stage.memory[20 * PAGE : 26 * PAGE])))
    stage.device.drain()
    assert seen == [bytes(stage.memory[: 6 * PAGE])]


def test_loads_do_not_wait_for_stores(stage: Stage) -> None:
    stored(stage)
    stage.device.freeze(*stage.device.lanes[False])
    stage.submit(STORE, 1, 3, 3, 3)
    stage.submit(LOAD, 2, 0, 3, 20)
    assert stage.result(2).ok
    assert stage.copier.jobs.poll() == []
    stage.device.thaw(*stage.device.lanes[False])
    assert stage.result(1).ok


def test_the_engines_thread_never_waits_for_the_device(stage: Stage) -> None:
    stage.device.freeze(stage.device.engine)
    stage.submit(STORE, 1, 0, RECORDS, 0)
    assert stage.copier.jobs.poll() == []
    stage.device.thaw(stage.device.engine)
    assert stage.result(1).ok
    assert threading.get_ident() not in stage.device.waiters


class Sealing(threading.Event):
    """Set when the copier may seal records."""


def test_blocks_may_be_reused_before_a_store_is_sealed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_seal = Sealing()
    seal = stage.copier._records.seal

    def later(*arguments: Any) -> Outcome:
        may_seal.wait()
        return seal(*arguments)

    monkeypatch.setattr(stage.copier._records, "seal", later)
    wanted = bytes(stage.page(1))
    stage.submit(STORE, 1, 1, 1, 1)
    stage.copier.jobs.wait([1])
    stage.page(1).fill(0)
    assert stage.copier.jobs.poll() == [], "but it is not complete yet"
    may_seal.set()
    assert stage.result(1).ok
    assert bytes(stage.host.record(1)[4096 : 4096 + PAGE]) == wanted


@pytest.mark.parametrize("how", ["refuses", "lost"], ids=["copies", "events"])
@pytest.mark.parametrize("kind", [LOAD, STORE])
def test_a_device_that_refuses_fails_the_job_alone(
    stage: Stage, kind: TransferKind, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored(stage)
    for lane in stage.device.lanes[kind is LOAD]:
        setattr(lane, how, True)
    stage.submit(kind, 1, 0, 2, 20)
    assert set(stage.result(1).outcomes) <= {Outcome.IO_ERROR, Outcome.CANCELLED}
    assert how == "lost" or "the device refused a" in caplog.text
    for lane in stage.device.lanes[kind is LOAD]:
        setattr(lane, how, False)
    stage.submit(kind, 2, 2, 2, 24)
    assert stage.result(2).ok


@pytest.mark.parametrize("kind", [LOAD, STORE])
def test_a_device_that_is_lost_fails_jobs_and_raises_nothing(
    stage: Stage, kind: TransferKind, caplog: pytest.LogCaptureFixture
) -> None:
    stored(stage)
    stage.device.freeze(stage.device.engine)
    stage.submit(kind, 1, 0, 2, 20)
    stage.device.broken = True
    stage.device.thaw(stage.device.engine)
    assert set(stage.result(1).outcomes) <= {Outcome.IO_ERROR, Outcome.CANCELLED}
    assert "the device failed a" in caplog.text


@pytest.mark.parametrize("kind", [LOAD, STORE])
def test_what_breaks_in_a_batch_fails_the_job_alone(
    stage: Stage, kind: TransferKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that ended would leave the engine waiting, and its buffer in nobody's hands."""
    stored(stage)
    step = "find" if kind is LOAD else "seal"
    where = (FakeStage, "sums") if stage.copier.staged else (stage.copier._records, step)

    def breaks(*arguments: Any) -> None:
        raise ValueError("operation forbidden on released memoryview object")

    for name in range(1, 6):  # more than there are threads
        with monkeypatch.context() as broken:
            broken.setattr(*where, breaks)
            stage.submit(kind, name, 0, 2, 20)
            assert set(stage.result(name).outcomes) <= {Outcome.IO_ERROR, Outcome.CANCELLED}
    stage.submit(kind, 9, 2, 2, 24)
    assert stage.result(9).ok


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (LOAD, "fetch"),
        (LOAD, "digest"),
        (LOAD, "scatter"),
        (STORE, "gather"),
        (STORE, "digest"),
        (STORE, "send"),
    ],
)
@pytest.mark.parametrize("stage", [(0, 2)], ids=str, indirect=True)
def test_each_step_by_way_of_a_buffer_may_fail(
    stage: Stage, kind: TransferKind, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block is to blame for that, and none counts as copied."""
    stored(stage)

    def breaks(*arguments: Any) -> None:
        raise RuntimeError("an illegal address was encountered")

    with monkeypatch.context() as broken:
        broken.setattr(FakeStage, step, breaks)
        stage.submit(kind, 1, 0, 2, 20)
        assert set(stage.result(1).outcomes) <= {Outcome.IO_ERROR, Outcome.CANCELLED}
    stage.submit(kind, 2, 2, 2, 24)
    assert stage.result(2).ok


def test_jobs_do_not_wait_while_memory_is_pinned_nor_for_pinning_that_fails(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stopped: list[bool] = []

    def prepare(stopping: threading.Event) -> None:
        stopped.append(stopping.wait())
        raise RuntimeError("no kernel for this device")

    copier = CudaCopier(
        records_of(stage.memory, stage.host),
        FakeDevice(),
        memory=FakeMemory(prepare),
    )
    for kind, state in ((STORE, table.RESERVED), (LOAD, table.VALID)):
        stage.host.put(0, stage.keys[0], state)
        blocks = DeviceBlocks(np.array([0]), [1], [0])
        copier.jobs.submit(
            CopyJob(id=0, kind=kind, keys=stage.keys[:1], slots=[0], blocks=blocks, deadline=5e9)
        )
        while not (results := copier.jobs.poll()):
            pass
        assert [result.ok for result in results] == [True]
    assert not stopped
    copier.close()
    assert stopped == [True], "closing does not wait for the rest of the memory"
    assert "slower than they could be" in caplog.text


def test_an_engine_s_start_waits_for_buffers_and_for_the_first_memory(stage: Stage) -> None:
    """Not for the rest of it; and what is done once beforehand touches no page and no slot."""
    go, rest = threading.Event(), threading.Event()
    before, records = stage.memory.copy(), [bytes(stage.host.record(slot)) for slot in range(4)]
    copier = CudaCopier(
        records_of(stage.memory, stage.host),
        FakeDevice(staging=2),
        memory=FakeMemory(lambda stopping: go.wait(60), lambda stopping: rest.wait(60)),
    )
    assert not copier.make_ready(0.01)
    go.set()
    assert copier.make_ready(60)
    assert copier.staged
    assert not copier.pinned
    rest.set()
    assert copier.prepared.wait(60)
    assert copier.pinned
    assert (stage.memory == before).all()
    assert records == [bytes(stage.host.record(slot)) for slot in range(4)]
    copier.close()


@pytest.mark.parametrize("stage", [(0, 2)], ids=str, indirect=True)
def test_a_copier_that_gets_too_few_threads_keeps_none(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job opens it anew, and closes the region that those left over would go on pinning."""
    start = threading.Thread.start
    started: list[threading.Thread] = []
    opened, closed = 0, 0

    def limited(thread: threading.Thread) -> None:
        if len(started) == opened:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def on_close() -> None:
        nonlocal closed
        assert not any(thread.is_alive() for thread in started)
        closed += 1

    monkeypatch.setattr(threading.Thread, "start", limited)
    while True:
        started.clear()
        try:
            copier = CudaCopier(
                records_of(stage.memory, stage.host),
                stage.device,
                memory=FakeMemory(threading.Event.wait, close=on_close),
            )
        except RuntimeError:
            opened += 1
            assert closed == opened
        else:
            break
    assert opened >= 10
    copier.close()


def test_what_a_load_waits_for_the_engine_is_no_time_of_the_link() -> None:
    memory = np.zeros(32 * PAGE, dtype=np.uint8)
    device, host, now = FakeDevice(0, 2), MemoryHost(LAYOUT, RECORDS), [0.0]

    class Computing:
        def synchronize(self) -> None:
            now[0] += 100.0

    copier = CudaCopier(records_of(memory, host), device, clock=lambda: now[0])
    assert copier.prepared.wait(60)
    stage = Stage(copier, device, host, memory, keys_of(RECORDS))
    try:
        stored(stage)
        stage.submit(LOAD, 1, 0, 2, 0, mark=Computing())
        result = stage.result(1)
    finally:
        copier.close()
    assert result.seconds >= 100.0
    assert result.busy_seconds == 0.0
