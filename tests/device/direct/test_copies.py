"""Loads whose records come straight from files, alone and beside those that come from slots."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.device.device_worlds import NAMESPACE, MemoryHost, World, jobs, keys_of, pages, worlds
from support.device.fake_cufile import FakeCufile
from support.device.fake_device import FakeDevice

from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cpu import CpuCopier
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.direct import DirectLoader
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef, cut
from kvtier.device.records import RankRecords
from kvtier.errors import MediumError
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES, Header, record_bytes, seal_part
from kvtier.slab import layout as table
from kvtier.types import BlockKey, FilePlace, Outcome

LOAD = TransferKind.LOAD
NEVER = float("inf")
PAGE, RECORDS = 4096, 12


def write_record(record: memoryview, layout: DeviceLayout, key: BlockKey, group: int) -> None:
    """A record of random bytes, as all of its ranks would have left it."""
    size = layout.group_bytes[group]
    Header(key, NAMESPACE, size, layout.parts).write(record)
    seed = int.from_bytes(key[:8], "big")
    record[HEADER_BYTES : HEADER_BYTES + size] = np.random.default_rng(seed).bytes(size)
    part = size // layout.parts
    for index in range(layout.parts):
        at = HEADER_BYTES + index * part
        seal_part(record, index, record[at : at + part])


class Disk:
    """Records in a file, one a key, and a driver that reads them."""

    def __init__(self, folder: Path, layout: DeviceLayout, keys: list[BlockKey], groups: list[int]):
        self.slot = record_bytes(max(layout.group_bytes))
        self.path = folder / "slab"
        self.data = bytearray(self.slot * len(keys))
        for index, (key, group) in enumerate(zip(keys, groups, strict=True)):
            write_record(self.record(index), layout, key, group)
        self.save()
        self.driver = FakeCufile()

    def record(self, index: int) -> memoryview:
        return memoryview(self.data)[index * self.slot : (index + 1) * self.slot]

    def save(self) -> None:
        self.path.write_bytes(self.data)

    def place(self, index: int) -> FilePlace:
        return FilePlace(str(self.path), index * self.slot)


def result_of(copier: CudaCopier, job: CopyJob) -> CopyResult:
    copier.jobs.submit(job)
    copier.jobs.wait([job.id])
    while not (results := copier.jobs.poll()):
        pass
    return results[0]


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_both_ways_bring_the_same_bytes(tmp_path: Path, data: st.DataObject) -> None:
    """Of random layouts, with partial chunks; each record by a way of its own."""
    world: World = data.draw(worlds())
    layout = world.layout
    blocks = data.draw(jobs(layout))
    groups = cut(layout, blocks).groups
    keys = keys_of(len(groups), groups=groups)
    disk = Disk(tmp_path, layout, keys, groups)
    host = MemoryHost(layout, max(1, len(keys)))
    direct = data.draw(st.sets(st.integers(0, max(0, len(keys) - 1)))) if keys else set()
    for slot, key in enumerate(keys):
        if slot not in direct:
            host.put(slot, key, table.VALID)
            host.record(slot)[:] = disk.record(slot)
    wanted = world.memory.copy()
    for page in pages(layout, blocks):
        source = disk.record(page.record)[page.host : page.host + page.size]
        wanted[page.device : page.device + page.size] = np.frombuffer(source, np.uint8)
    addressed = world.addressed()
    copier = CudaCopier(
        RankRecords(addressed, host, NAMESPACE),
        FakeDevice(data.draw(st.integers(0, 9))),
        open_direct=lambda: DirectLoader(addressed, disk.driver, NAMESPACE, stages=2),
    )
    try:
        result = result_of(
            copier,
            CopyJob(
                id=1,
                kind=LOAD,
                keys=keys,
                slots=[-1 if slot in direct else slot for slot in range(len(keys))],
                blocks=blocks,
                deadline=NEVER,
                files={at: disk.place(at) for at in direct},
            ),
        )
    finally:
        copier.close()
    assert result.ok
    assert (world.memory == wanted).all(), "every page is there, and nothing else was touched"
    sizes = [page.size for page in pages(layout, blocks) if page.record in direct]
    assert result.bytes_read == sum(sizes)
    assert result.bytes_moved == sum(page.size for page in pages(layout, blocks))
    assert disk.driver.reads == len(direct)
    assert disk.driver.open_files == 0


class Rig:
    """Twelve records of one page, on disk and in slots."""

    def __init__(self, folder: Path) -> None:
        layout = DeviceLayout((DeviceTensor(0, 64, PAGE, PAGE),), ((PageRef(0, PAGE),),))
        self.memory = np.zeros(64 * PAGE, np.uint8)
        self.keys = keys_of(RECORDS)
        self.disk = Disk(folder, layout, self.keys, [0] * RECORDS)
        self.driver = self.disk.driver
        self.host = MemoryHost(layout, RECORDS)
        for slot, key in enumerate(self.keys):
            self.host.put(slot, key, table.VALID)
            self.host.record(slot)[:] = self.disk.record(slot)
        self.device = FakeDevice()
        self.now = 0.0
        self.layout = World(layout, self.memory).addressed()
        self.opened = threading.Event()
        self.opened.set()
        self.copier = CudaCopier(
            RankRecords(self.layout, self.host, NAMESPACE),
            self.device,
            clock=lambda: self.now,
            open_direct=self.open,
        )

    def open(self) -> DirectLoader:
        self.opened.wait()
        return DirectLoader(
            self.layout, self.driver, NAMESPACE, stages=4, clock=lambda: self.now, sleep=self.sleep
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def job(
        self, name: int, direct: range, slots: range = range(0), deadline: float = 1.0
    ) -> CopyJob:
        rows = [*direct, *slots]
        return CopyJob(
            id=name,
            kind=LOAD,
            keys=[self.keys[row] for row in rows],
            slots=[-1] * len(direct) + list(slots),
            blocks=DeviceBlocks(np.arange(len(rows)) + 20, [len(rows)], [0]),
            deadline=self.now + deadline,
            files={at: self.disk.place(row) for at, row in enumerate(direct)},
        )

    def load(self, name: int, direct: range, slots: range = range(0)) -> list[Outcome]:
        return result_of(self.copier, self.job(name, direct, slots)).outcomes

    def arrived(self, block: int, record: int) -> bool:
        page = self.memory[block * PAGE : (block + 1) * PAGE]
        return bytes(page) == bytes(self.disk.record(record)[HEADER_BYTES : HEADER_BYTES + PAGE])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.driver.hangs = False
    rig.copier.close()


def test_more_records_than_buffers_and_some_in_slots(rig: Rig) -> None:
    assert rig.load(1, range(8), range(8, 12)) == [Outcome.OK] * 12
    assert all(rig.arrived(20 + row, row) for row in range(12))
    assert rig.copier.reads_files


FAULTS: list[tuple[str, Any, Outcome]] = [
    ("fails", OSError(5, "Input/output error"), Outcome.IO_ERROR),
    ("no_file", RuntimeError("cuFile: 5030"), Outcome.IO_ERROR),
    ("refuses", True, Outcome.IO_ERROR),
    ("fails", MemoryError("std::bad_alloc"), Outcome.IO_ERROR),
    ("fails", struct.error("unpack requires a buffer of 16 bytes"), Outcome.IO_ERROR),
    ("no_file", AssertionError("this cannot be"), Outcome.IO_ERROR),
    ("no_file", IndexError("invalid unordered_map key"), Outcome.IO_ERROR),
    ("short", 4096, Outcome.IO_ERROR),
    ("hangs", True, Outcome.TIMEOUT),
]


@pytest.mark.parametrize(("fault", "value", "outcome"), FAULTS)
def test_every_fault_of_the_driver_fails_the_load_and_touches_no_page(
    rig: Rig, fault: str, value: Any, outcome: Outcome
) -> None:
    setattr(rig.driver, fault, value)
    outcomes = rig.load(1, range(2), range(4, 6))
    assert outcomes[0] is outcome
    assert outcomes[1] in (outcome, Outcome.CANCELLED)
    assert not rig.memory[20 * PAGE : 22 * PAGE].any()
    setattr(rig.driver, fault, getattr(FakeCufile, fault))
    assert rig.load(2, range(2)) == [Outcome.OK] * 2
    assert rig.driver.open_files == 0


def test_wrong_bytes_reach_no_page(rig: Rig) -> None:
    rig.disk.record(0)[HEADER_BYTES + 7] ^= 1
    rig.disk.save()
    assert rig.load(1, range(1)) == [Outcome.CORRUPT]
    assert not rig.memory.any()


def test_a_slot_that_is_used_again_meanwhile_is_gone(rig: Rig) -> None:
    def replace() -> None:
        write_record(rig.disk.record(0), rig.layout, rig.keys[5], 0)
        rig.disk.save()

    rig.driver.before_read = replace
    assert rig.load(1, range(1)) == [Outcome.GONE]
    assert not rig.memory.any()


def test_a_file_that_is_cut_short_or_no_longer_there_is_gone(rig: Rig) -> None:
    rig.disk.path.write_bytes(rig.disk.path.read_bytes()[:100])
    assert rig.load(1, range(1)) == [Outcome.GONE]
    rig.disk.path.unlink()
    assert rig.load(2, range(1)) == [Outcome.GONE]


def test_wait_returns_once_no_page_can_change_any_more(rig: Rig) -> None:
    rig.driver.hangs = True
    rig.copier.jobs.submit(rig.job(1, range(6)))
    rig.copier.jobs.wait([1])
    rig.driver.hangs = False
    (result,) = rig.copier.jobs.poll()
    assert result.outcomes[0] is Outcome.TIMEOUT
    before = rig.memory.copy()
    assert rig.load(2, range(6, 8)) == [Outcome.OK] * 2
    rig.device.drain()
    assert (rig.memory[22 * PAGE :] == before[22 * PAGE :]).all()


def test_pages_are_written_after_what_the_engine_does_before(rig: Rig) -> None:
    def clear() -> None:
        rig.memory[20 * PAGE : 21 * PAGE] = 0

    rig.device.engine.do(clear)
    rig.copier.jobs.submit(rig.job(1, range(1)))
    rig.copier.jobs.wait([1])
    assert rig.arrived(20, 0)


def test_other_loads_go_on_while_a_read_hangs(rig: Rig) -> None:
    rig.driver.hangs = True
    rig.copier.jobs.submit(rig.job(1, range(1), deadline=NEVER))
    assert rig.load(2, range(0), range(4)) == [Outcome.OK] * 4
    rig.driver.hangs = False
    rig.copier.jobs.wait([1])


def test_a_load_that_is_given_up_waits_for_the_reads_that_have_begun(rig: Rig) -> None:
    rig.driver.hangs = True
    rig.copier.jobs.submit(rig.job(1, range(8), deadline=NEVER))
    while rig.driver.reads < 4:
        pass
    rig.copier.jobs.give_up(1)
    assert rig.copier.jobs.poll() == []
    rig.driver.hangs = False
    rig.copier.jobs.wait([1])
    while not (results := rig.copier.jobs.poll()):
        pass
    assert results[0].outcomes == [Outcome.OK] * 4 + [Outcome.CANCELLED] * 4
    assert rig.copier.reads_files, "nothing has failed"


def test_close_does_not_wait_for_a_read_that_hangs(rig: Rig) -> None:
    rig.driver.hangs = True
    rig.copier.jobs.submit(rig.job(1, range(1), deadline=NEVER))
    rig.copier.close()
    assert [result.outcomes for result in rig.copier.jobs.poll()] == [[Outcome.CANCELLED]]


def test_close_does_not_wait_until_it_is_known_whether_files_can_be_read(rig: Rig) -> None:
    rig.opened.clear()
    copier = CudaCopier(
        RankRecords(rig.layout, rig.host, NAMESPACE), rig.device, open_direct=rig.open
    )
    copier.jobs.submit(rig.job(1, range(1), deadline=NEVER))
    copier.close()
    assert copier.jobs.poll()[0].outcomes == [Outcome.CANCELLED]
    rig.opened.set()


def test_after_failures_in_a_row_no_more_are_asked_for(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.driver.fails = OSError(5, "Input/output error")
    for name in range(3):
        assert not rig.load(name, range(1))[0].ok
    assert not rig.copier.reads_files
    assert caplog.text.count("loads go through pinned memory") == 1


def test_one_load_that_is_late_says_nothing_of_those_to_come(rig: Rig) -> None:
    """It has many reads under way, all of which are given up then."""
    for fault, value in (("hangs", True), ("fails", OSError(5, "Input/output error"))):
        setattr(rig.driver, fault, value)
        assert not any(outcome.ok for outcome in rig.load(1, range(4)))
        assert rig.copier.reads_files
        setattr(rig.driver, fault, getattr(FakeCufile, fault))
        assert rig.load(2, range(4)) == [Outcome.OK] * 4


def test_when_every_buffer_hangs_loads_fail_at_once(rig: Rig) -> None:
    rig.driver.hangs = True
    for name in range(4):
        assert rig.load(name, range(1)) == [Outcome.TIMEOUT]
    began = rig.now
    assert rig.load(9, range(1)) == [Outcome.DROPPED]
    assert rig.now == began
    rig.driver.hangs = False
    assert rig.load(10, range(1)) == [Outcome.OK]


def test_files_named_too_early_wait_until_they_can_be_read(rig: Rig, tmp_path: Path) -> None:
    rig.opened.clear()
    again = CudaCopier(
        RankRecords(rig.layout, rig.host, NAMESPACE),
        rig.device,
        clock=lambda: rig.now,
        open_direct=rig.open,
    )
    assert not again.reads_files
    again.jobs.submit(rig.job(1, range(1)))
    rig.now += 2
    again.jobs.wait([1])
    assert again.jobs.poll()[0].outcomes == [Outcome.TIMEOUT]
    rig.opened.set()
    assert result_of(again, rig.job(2, range(1))).ok
    again.close()


@pytest.mark.parametrize("error", [None, RuntimeError("no memory"), MediumError("required")])
def test_where_it_does_not_work_files_are_dropped(rig: Rig, error: Exception | None) -> None:
    def open_direct() -> None:
        if error is not None:
            raise error

    copier = CudaCopier(
        RankRecords(rig.layout, rig.host, NAMESPACE),
        rig.device,
        clock=lambda: rig.now,
        open_direct=open_direct,
    )
    assert result_of(copier, rig.job(1, range(1))).outcomes == [Outcome.DROPPED]
    assert not copier.reads_files
    copier.close()


def test_who_never_reads_files_refuses_jobs_that_name_some(rig: Rig) -> None:
    array = rig.memory.reshape(64, PAGE)
    for copier in (
        CudaCopier(RankRecords(rig.layout, rig.host, NAMESPACE), rig.device),
        CpuCopier(RankRecords(rig.layout, rig.host, NAMESPACE), [array]),
    ):
        with pytest.raises(ValueError, match="names files"):
            copier.jobs.submit(rig.job(1, range(1)))
        copier.close()
