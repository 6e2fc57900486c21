"""Buffers that have no room for whole batches, as where a model left little of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of
from support.device.fake_device import FakeDevice, FakeStage
from support.processes.clocks import Clock

from kvtier.device.copier import CopyJob, Stage
from kvtier.device.cuda.copier import STORES_AT_ONCE, CudaCopier, StagedPath, StagePool
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.pacing import EngineSteps, StorePace
from kvtier.device.queue import CopyBatch, JobQueue
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES
from kvtier.slab import layout as table
from kvtier.types import FilePlace, Outcome

PAGE, ROWS = 512, 8


def setting() -> tuple[Any, DeviceLayout, MemoryHost, CopyJob]:
    """A device's memory, and a store of all of it."""
    pool = np.arange(ROWS * PAGE, dtype=np.uint32).astype(np.uint8)
    tensor = DeviceTensor(int(pool.ctypes.data), ROWS, PAGE, PAGE)
    layout = DeviceLayout((tensor,), ((PageRef(0, PAGE),),))
    host, keys = MemoryHost(layout, ROWS), keys_of(ROWS)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.RESERVED)
    job = CopyJob(
        id=0,
        kind=TransferKind.STORE,
        keys=keys,
        slots=list(range(ROWS)),
        blocks=DeviceBlocks(np.arange(ROWS), [ROWS], [0]),
        deadline=float("inf"),
    )
    return pool, layout, host, job


def test_batches_are_cut_to_fit() -> None:
    _pool, layout, host, job = setting()
    job_queue = JobQueue(RankRecords(layout, host, NAMESPACE), 100 * PAGE)
    job_queue.fit([3])
    job_queue.fit([5])
    job_queue.submit(job)
    cut = [job_queue.next(job_queue.store, wait=False) for _ in range(3)]
    assert [batch and len(batch.rows) for batch in cut] == [3, 3, 2]


def test_jobs_name_keys_of_their_groups_and_files_of_their_keys() -> None:
    _pool, layout, host, job = setting()
    layout = msgspec.structs.replace(layout, group_ids=(1,))
    job_queue = JobQueue(RankRecords(layout, host, NAMESPACE), PAGE, reads_files=True)
    with pytest.raises(ValueError, match="7 keys and 8 slots for 8"):
        job_queue.submit(msgspec.structs.replace(job, keys=job.keys[1:]))
    with pytest.raises(ValueError, match="other groups"):
        job_queue.submit(job)
    job = msgspec.structs.replace(job, keys=keys_of(ROWS, groups=[1] * ROWS))
    for at in (ROWS, ROWS + 1):
        with pytest.raises(ValueError, match="files"):
            job_queue.submit(msgspec.structs.replace(job, files={at: FilePlace("slab", 0)}))
    job_queue.submit(job)
    assert job_queue.next(job_queue.store, wait=False) is not None


def test_an_empty_job_ends_at_once() -> None:
    _pool, layout, host, job = setting()
    job_queue = JobQueue(RankRecords(layout, host, NAMESPACE), PAGE)
    nothing = DeviceBlocks(np.arange(0), [0], [0])
    job_queue.submit(msgspec.structs.replace(job, keys=[], slots=[], blocks=nothing))
    (result,) = job_queue.poll()
    assert (result.ok, result.bytes_moved) == (True, 0)


def test_one_bad_slot_stops_no_store() -> None:
    _pool, layout, host, job = setting()
    job_queue = JobQueue(RankRecords(layout, host, NAMESPACE), PAGE)
    job_queue.submit(job)
    outcomes = [Outcome.GONE] + [Outcome.OK] * (ROWS - 1)
    for outcome in outcomes:
        batch = job_queue.next(job_queue.store, wait=False)
        assert batch is not None
        job_queue.finish(batch, [outcome])
    (result,) = job_queue.poll()
    assert (result.outcomes, result.bytes_moved) == (outcomes, (ROWS - 1) * PAGE)


def test_a_batch_that_was_cut_before_goes_page_by_page() -> None:
    _pool, layout, host, job = setting()
    job_queue = JobQueue(RankRecords(layout, host, NAMESPACE), 100 * PAGE)
    job_queue.submit(job)
    large = job_queue.next(job_queue.store)
    assert large is not None
    assert len(large.rows) == ROWS
    pool = StagePool()
    assert not pool.fits(large)
    pool.use(FakeDevice(staging=2, room=3 * PAGE).stages(layout, 100 * PAGE, urgent=False))
    assert not pool.fits(large)
    assert pool.fits(CopyBatch(large.work, large.rows[:3]))


def test_an_engine_that_waits_for_a_store_does_not_wait_for_its_pace() -> None:
    _pool, layout, host, job = setting()
    steps, clock = EngineSteps(), Clock()
    device = FakeDevice(staging=2, room=3 * PAGE)
    copier = CudaCopier(RankRecords(layout, host, NAMESPACE), device, steps=steps, clock=clock)
    assert copier.prepared.wait(60)
    assert steps.listener is not None
    copier._pace.share, copier._pace._next = 1 / 64, clock() + 3600
    steps.listener(1, 0.006)
    assert copier._pace.delay() == 3600
    copier.jobs.submit(job)
    copier.jobs.wait([0])  # until the job has left its blocks; then it ends well
    while not (results := copier.jobs.poll()):
        pass
    assert results[0].ok
    copier.close()
    assert steps.listener is None


def test_room_for_loads_alone_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """What loads take of the device may be what stores lack."""
    _pool, layout, host, _job = setting()

    class Small(FakeDevice):
        def stages(
            self, layout: DeviceLayout, batch_bytes: int, *, urgent: bool
        ) -> list[FakeStage]:
            if not urgent:
                raise RuntimeError("they do not fit")
            return super().stages(layout, batch_bytes, urgent=urgent)

    copier = CudaCopier(RankRecords(layout, host, NAMESPACE), Small(staging=2))
    assert copier.prepared.wait(60)
    assert "stores are copied page by page and verified by the host: they do not fit" in caplog.text
    assert (bool(copier._load_stages), bool(copier._store_stages)) == (True, False)
    copier.close()


def by_one_buffer(
    layout: DeviceLayout, host: MemoryHost
) -> tuple[FakeDevice, JobQueue, StagedPath, Stage]:
    """For one record."""
    device, records = FakeDevice(staging=1, room=PAGE), RankRecords(layout, host, NAMESPACE)
    (stage,) = device.stages(layout, PAGE, urgent=True)
    job_queue = JobQueue(records, PAGE)
    return device, job_queue, StagedPath(records, job_queue, StorePace()), stage


def test_how_far_the_engine_has_come_is_asked_once_for_each_job() -> None:
    """Each time gives the GIL away."""
    _pool, layout, host, job = setting()
    _device, job_queue, path, stage = by_one_buffer(layout, host)
    asked = 0

    class Mark:
        def synchronize(self) -> None:
            nonlocal asked
            asked += 1

    for name in range(2):
        job_queue.submit(msgspec.structs.replace(job, id=name), Mark())
        while (batch := job_queue.next(job_queue.store, wait=False)) is not None:
            path.store(batch, stage)
    assert [result.ok for result in job_queue.poll()] == [True, True]
    assert asked == 2


def test_what_crosses_the_link_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    _pool, layout, host, job = setting()
    device, job_queue, path, stage = by_one_buffer(layout, host)
    turns, crossed = path._turns, list[str]()

    def seen(step: str, whether: Callable[[], bool]) -> None:
        real = getattr(FakeStage, step)

        def cross(*arguments: Any) -> Any:
            assert whether()
            crossed.append(step)
            return real(*arguments)

        monkeypatch.setattr(FakeStage, step, cross)

    seen("send", lambda: turns._room._value == STORES_AT_ONCE - 1)
    seen("fetch", lambda: turns._loads == 1)
    job_queue.submit(job, device.mark())
    while (batch := job_queue.next(job_queue.store, wait=False)) is not None:
        path.store(batch, stage)
    for slot, key in enumerate(job.keys):
        host.put(slot, key, table.VALID)
    job_queue.submit(msgspec.structs.replace(job, kind=TransferKind.LOAD), device.mark())
    while (batch := job_queue.next(job_queue.load, wait=False)) is not None:
        path.load(batch, stage)
    assert crossed == ["send"] * ROWS + ["fetch"] * ROWS


def test_nothing_more_of_a_failed_load_is_copied() -> None:
    """Nobody waits for it any more, and the engine may give its blocks to others."""
    pool, layout, host, job = setting()
    device, job_queue, path, stage = by_one_buffer(layout, host)
    job_queue.submit(job, device.mark())
    while (batch := job_queue.next(job_queue.store, wait=False)) is not None:
        path.store(batch, stage)
    for slot, key in enumerate(job.keys):
        host.put(slot, key, table.VALID)
    host.record(0)[HEADER_BYTES] ^= 1
    turned = DeviceBlocks(np.arange(ROWS)[::-1].copy(), [ROWS], [0])
    before = pool.copy()
    job_queue.submit(
        msgspec.structs.replace(job, id=1, kind=TransferKind.LOAD, blocks=turned), device.mark()
    )
    while (batch := job_queue.next(job_queue.load, wait=False)) is not None:
        path.load(batch, stage)
        job_queue.wait([1])
    stored, loaded = job_queue.poll()
    assert stored.ok
    assert loaded.outcomes == [Outcome.CORRUPT] + [Outcome.CANCELLED] * (ROWS - 1)
    assert (pool == before).all()


class Sleeper(threading.Condition):
    """Says how often somebody has gone to sleep."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self.slept = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.slept.release()
        return super().wait(timeout)


@pytest.mark.timeout(120)
def test_an_engine_does_not_wait_for_what_is_only_looked_at_of_a_failed_load() -> None:
    """The last batch that might write to its blocks has ended; the others are of no use to it."""
    _pool, layout, host, job = setting()
    job_queue = JobQueue(RankRecords(layout, host, NAMESPACE), PAGE)
    job_queue._done = sleeper = Sleeper(job_queue._lock)
    for slot, key in enumerate(job.keys):
        host.put(slot, key, table.VALID)
    job_queue.submit(msgspec.structs.replace(job, kind=TransferKind.LOAD))
    first, second = (job_queue.next(job_queue.load, wait=False) for _ in range(2))
    assert first is not None
    assert second is not None
    engine = threading.Thread(target=job_queue.wait, args=([0],), daemon=True)
    engine.start()
    assert sleeper.slept.acquire(timeout=60)
    job_queue.finish(first, [Outcome.CORRUPT])
    assert job_queue._touching([0]), "the second might still write"
    assert engine.is_alive()
    job_queue.finish(second, [Outcome.OK])
    engine.join(20)
    assert not engine.is_alive()
    assert job_queue.poll() == [], "the others are still to be looked at"
