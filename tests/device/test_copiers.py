"""What every copier does: right bytes, right proofs, right order. Run on both kinds."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device.device_worlds import NAMESPACE, MemoryHost, World, jobs, keys_of, pages, worlds
from support.device.fake_device import FakeDevice, FakeMemory

from kvtier.device import cpu as cpu_copier
from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cpu import CpuCopier
from kvtier.device.cuda import copier as cuda_copier
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef, cut
from kvtier.device.queue import DeviceCopier, JobQueue
from kvtier.device.records import RankRecords
from kvtier.interfaces.handler import HostSlots
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES, Header, verify
from kvtier.slab import layout as table
from kvtier.types import BlockKey, Outcome

LOAD, STORE = TransferKind.LOAD, TransferKind.STORE
NEVER = float("inf")


@pytest.fixture(params=["cpu", "streams", "staged", "tight"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_copier(
    kind: str, world: World, host: HostSlots, namespace: bytes = NAMESPACE, **more: Any
) -> DeviceCopier:
    if kind == "cpu":
        return CpuCopier(RankRecords(world.layout, host, namespace), world.arrays(), **more)
    room = 1 if kind == "tight" else 1 << 30  # for a record, or for whole batches
    device = FakeDevice(staging=0 if kind == "streams" else 3, room=room)
    copier = CudaCopier(RankRecords(world.addressed(), host, namespace), device, **more)
    assert copier.prepared.wait(60)
    return copier


def run(copier: DeviceCopier, *each: CopyJob) -> list[CopyResult]:
    """Jobs to their ends."""
    for job in each:
        copier.jobs.submit(job)
    return ended(copier, *(job.id for job in each))


def ended(copier: DeviceCopier, *ids: int) -> list[CopyResult]:
    """The ends of jobs, which come after what an engine waits for."""
    copier.jobs.wait(ids)
    results: list[CopyResult] = []
    while len(results) < len(ids):
        results += copier.jobs.poll()
    return results


def job_of(kind: TransferKind, blocks: DeviceBlocks, keys: list[BlockKey], **more: Any) -> CopyJob:
    fields: dict[str, Any] = {"id": 1, "deadline": NEVER, "slots": list(range(len(keys))), **more}
    return CopyJob(kind=kind, keys=keys, blocks=blocks, **fields)


@pytest.mark.parametrize("of", ["cpu", "strips", "streams", "staged", "tight"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_records_out_and_back_are_the_same_pages(of: str, data: st.DataObject) -> None:
    """Store whole chunks from random layouts, wipe the device, load them back."""
    world: World = data.draw(worlds())
    if of == "strips":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_copier, "_STRIP_BYTES", data.draw(st.integers(1, 1 << 16)))
            out_and_back("cpu", world, data)
    else:
        out_and_back(of, world, data)


def out_and_back(of: str, world: World, data: st.DataObject) -> None:
    layout = world.layout
    stored = data.draw(jobs(layout, whole=True))
    groups = cut(layout, stored).groups
    host = MemoryHost(layout, max(len(groups), 1))
    keys = keys_of(len(groups), groups=groups)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.RESERVED)
        size = layout.group_bytes[groups[slot]]
        Header(key, NAMESPACE, size, layout.parts).write(host.record(slot))  # as rank 0 does
    before = world.memory.copy()
    copier = open_copier(of, world, host)
    try:
        (result,) = run(copier, job_of(STORE, stored, keys))
        assert result.ok
        for slot, key in enumerate(keys):
            host.put(slot, key, table.VALID)
        for page in pages(layout, stored):
            record = host.record(page.record)
            assert bytes(record[page.host : page.host + page.size]) == bytes(
                before[page.device : page.device + page.size]
            )
        world.memory[:] = 0
        (result,) = run(copier, job_of(LOAD, stored, keys))
    finally:
        copier.close()
    assert result.ok
    expected = np.zeros_like(before)
    for page in pages(layout, stored):
        expected[page.device : page.device + page.size] = before[
            page.device : page.device + page.size
        ]
    assert (world.memory == expected).all(), "every page is back, and nothing else was touched"
    assert result.bytes_moved == sum(page.size for page in pages(layout, stored))


@pytest.fixture
def world() -> World:
    """Three layers of 4 KiB pages, two blocks a chunk, one rank."""
    tensors = tuple(DeviceTensor(layer << 20, 32, 4096, 4096) for layer in range(3))
    groups = (tuple(PageRef(layer, 4096) for layer in range(3)),)
    memory = np.random.default_rng(1).integers(0, 256, 4 << 20, dtype=np.uint8)
    return World(DeviceLayout(tensors, groups, blocks_per_chunk=2), memory)


@pytest.fixture
def host(world: World) -> MemoryHost:
    return MemoryHost(world.layout, 8)


@pytest.fixture
def copier(kind: str, world: World, host: MemoryHost) -> Iterator[DeviceCopier]:
    copier = open_copier(kind, world, host)
    yield copier
    copier.close()


def filled(copier: DeviceCopier, host: MemoryHost, count: int = 4) -> list[BlockKey]:
    """`count` records stored from the first blocks, committed."""
    keys = keys_of(count)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.RESERVED)
    (result,) = run(
        copier, job_of(STORE, DeviceBlocks(np.arange(2 * count), [2 * count], [0]), keys)
    )
    assert result.ok
    for slot, key in enumerate(keys):
        host.put(slot, key, table.VALID)
    return keys


def onto(blocks: int, at: int = 16, start: int = 0) -> DeviceBlocks:
    return DeviceBlocks(np.arange(at, at + blocks), [blocks], [start])


def test_a_stored_record_proves_itself(copier: DeviceCopier, host: MemoryHost) -> None:
    for slot, key in enumerate(filled(copier, host)):
        assert verify(host.record(slot), key, NAMESPACE) is Outcome.OK


@pytest.mark.parametrize(("count", "start"), [(3, 5), (3, 4), (4, 5), (1, 4), (1, 5)])
def test_what_is_missing_of_partial_chunks_is_skipped(
    copier: DeviceCopier, host: MemoryHost, world: World, count: int, start: int
) -> None:
    keys, first = filled(copier, host), start % 2
    original = world.memory.copy().reshape(-1, 4096)
    (result,) = run(
        copier, job_of(LOAD, onto(count, start=start), keys[: -(-(first + count) // 2)])
    )
    assert result.ok
    for layer in range(0, 3 << 8, 1 << 8):
        expected = original[layer : layer + 32]
        expected[16 : 16 + count] = expected[first : first + count].copy()
    assert (world.memory.reshape(-1, 4096) == original).all()


def test_a_partial_chunk_is_never_stored(copier: DeviceCopier, host: MemoryHost) -> None:
    keys = keys_of(2)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.RESERVED)
    (result,) = run(copier, job_of(STORE, DeviceBlocks(np.arange(3), [3], [1]), keys))
    assert result.outcomes == [Outcome.DROPPED] * 2, "nobody knows which block is missing"


def flip(host: MemoryHost, slot: int, at: int) -> None:
    host.record(slot)[at] ^= 1


@pytest.mark.parametrize("at", [0, 20, 60, 90, HEADER_BYTES, HEADER_BYTES + 6 * 4096 - 1])
def test_a_flipped_bit_is_corruption_and_reaches_no_page(
    copier: DeviceCopier, host: MemoryHost, world: World, at: int
) -> None:
    keys = filled(copier, host, 1)
    flip(host, 0, at)
    before = world.memory.copy()
    (result,) = run(copier, job_of(LOAD, onto(2), keys))
    assert result.outcomes == [Outcome.CORRUPT]
    assert (world.memory == before).all()


def test_a_record_of_another_namespace_key_or_geometry_is_refused(
    copier: DeviceCopier, host: MemoryHost, world: World, kind: str
) -> None:
    keys = filled(copier, host, 2)
    host.record(1)[:] = host.record(0)
    assert run(copier, job_of(LOAD, onto(4), keys))[0].outcomes[1] is Outcome.CORRUPT
    elsewhere = open_copier(kind, world, host, bytes(16))
    assert run(elsewhere, job_of(LOAD, onto(2), keys[:1]))[0].outcomes == [Outcome.CORRUPT]
    elsewhere.close()


@pytest.mark.parametrize("state", [table.FREE, table.BAD])
def test_a_slot_that_holds_something_else_is_gone(
    copier: DeviceCopier, host: MemoryHost, state: int
) -> None:
    keys = filled(copier, host, 2)
    host.put(0, keys[0], state)
    host.put(1, keys_of(1, tag=9)[0], table.VALID)
    (first,) = run(copier, job_of(LOAD, onto(2), keys[:1]))
    (second,) = run(copier, job_of(LOAD, onto(2), keys[1:], slots=[1]))
    assert first.outcomes == second.outcomes == [Outcome.GONE]


class Treacherous(MemoryHost):
    """Gives a slot to another key while it is being copied."""

    victim = -1

    def record(self, slot: int) -> memoryview:
        if slot == self.victim:
            self._replace()
        return super().record(slot)

    @property
    def data(self) -> memoryview:
        self._replace()
        return super().data

    def _replace(self) -> None:
        if self.victim >= 0:
            other = keys_of(1, tag=7)[0]
            self.put(self.victim, other, self.entries[self.victim][0], generation=2)


@pytest.mark.parametrize("way", [LOAD, STORE])
def test_a_slot_replaced_during_the_copy_is_gone(
    world: World, kind: str, way: TransferKind
) -> None:
    host = Treacherous(world.layout, 8)
    copier = open_copier(kind, world, host)
    keys = filled(copier, host, 2)
    if way is STORE:
        host.put(1, keys[1], table.RESERVED)
    host.victim = 1
    (result,) = run(copier, job_of(way, onto(2), keys[1:], slots=[1]))
    copier.close()
    assert result.outcomes in ([Outcome.GONE], [Outcome.CORRUPT])
    assert not result.ok


def test_a_store_into_a_slot_that_is_not_reserved_writes_nothing(
    copier: DeviceCopier, host: MemoryHost
) -> None:
    keys = filled(copier, host, 1)
    before = bytes(host.record(0))
    (result,) = run(copier, job_of(STORE, onto(2), keys))
    assert result.outcomes == [Outcome.GONE]
    assert bytes(host.record(0)) == before


def test_records_are_loaded_as_they_arrive(
    copier: DeviceCopier, host: MemoryHost, world: World
) -> None:
    """The last one arrives first: it is on the device while the others are still on their way."""
    keys = filled(copier, host)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.RESERVED)
    copier.jobs.submit(job_of(LOAD, onto(8), keys))
    host.put(3, keys[3], table.ARRIVED)
    page = slice(16 * 4096 + 6 * 4096, 16 * 4096 + 7 * 4096)
    while not (world.memory[page] == world.memory[6 * 4096 : 7 * 4096]).all():
        assert not copier.jobs.poll()
    for slot in (1, 0, 2):
        host.put(slot, keys[slot], table.ARRIVED)
    copier.jobs.wait([1])
    (result,) = copier.jobs.poll()
    assert result.ok


def test_an_arrival_that_failed_fails_the_load_and_cancels_the_rest(
    copier: DeviceCopier, host: MemoryHost, world: World
) -> None:
    keys = filled(copier, host)
    for slot in (1, 2, 3):
        host.put(slot, keys[slot], table.RESERVED)
    copier.jobs.submit(job_of(LOAD, onto(8), keys))
    (work,) = copier.jobs._loads
    while work.outcomes[0] is not Outcome.OK:
        assert not copier.jobs.poll()
    assert (world.memory[16 * 4096 : 18 * 4096] == world.memory[: 2 * 4096]).all()
    host.put(1, keys[1], table.FAILED)
    copier.jobs.wait([1])
    (result,) = copier.jobs.poll()
    assert result.outcomes == [
        Outcome.OK,
        Outcome.IO_ERROR,
        Outcome.CANCELLED,
        Outcome.CANCELLED,
    ]


def test_a_failed_load_finds_all_that_is_bad(
    copier: DeviceCopier, host: MemoryHost, world: World, kind: str
) -> None:
    """Good ones after the first bad one are not copied, unless a thread has them in hand by then,
    as with tight buffers; and nobody waits for what is on its way."""
    keys = filled(copier, host, 8)
    for slot, at in ((2, 20), (3, 20), (6, HEADER_BYTES + 6)):
        flip(host, slot, at)
    host.put(5, keys[5], table.RESERVED)
    host.put(7, keys[7], table.FAILED)
    before = world.memory.copy()
    (result,) = run(copier, job_of(LOAD, onto(16), keys))
    ok, bad, gone, not_read = Outcome.OK, Outcome.CORRUPT, Outcome.CANCELLED, Outcome.IO_ERROR
    good, late = result.outcomes[:2], result.outcomes.pop(4)
    assert result.outcomes[2:] == [bad, bad, gone, bad, not_read]
    assert set(good) <= {ok, gone}
    assert late is gone or (late is ok and kind == "tight")
    for layer in range(3):
        for slot in (2, 3, 5, 6, 7, *([] if late is ok else [4])):
            begin = (layer << 20) + (16 + 2 * slot) * 4096
            page = slice(begin, begin + 2 * 4096)
            assert (world.memory[page] == before[page]).all()


def test_an_arrival_that_is_too_late_times_out(world: World, host: MemoryHost, kind: str) -> None:
    now = [0.0]
    copier = open_copier(kind, world, host, clock=lambda: now[0])
    keys = filled(copier, host, 2)
    host.put(1, keys[1], table.RESERVED)
    copier.jobs.submit(job_of(LOAD, onto(4), keys, deadline=5.0))
    assert copier.jobs.poll() == []
    now[0] = 5.0
    copier.jobs.wait([1])
    (result,) = copier.jobs.poll()
    copier.close()
    assert result.outcomes == [Outcome.OK, Outcome.TIMEOUT]


def test_a_load_that_is_given_up_waits_for_nothing_more(
    world: World, host: MemoryHost, kind: str
) -> None:
    copier = open_copier(kind, world, host)
    keys = filled(copier, host, 3)
    for row in (1, 2):
        host.put(row, keys[row], table.RESERVED)
    copier.jobs.submit(job_of(LOAD, onto(6), keys))
    copier.jobs.submit(job_of(LOAD, onto(4), keys[:2], id=2))
    copier.jobs.give_up(9)
    assert copier.jobs.poll() == [], "that is none of these"
    copier.jobs.give_up(1)
    (result,) = ended(copier, 1)
    assert result.outcomes[1:] == [Outcome.CANCELLED] * 2
    host.put(1, keys[1], table.ARRIVED)
    (result,) = ended(copier, 2)
    copier.close()
    assert result.ok, "others wait on"


def test_a_load_of_which_all_has_arrived_is_not_given_up(
    world: World, host: MemoryHost, kind: str
) -> None:
    copier = open_copier(kind, world, host)
    keys = filled(copier, host, 2)
    copier.jobs.submit(job_of(LOAD, onto(4), keys))
    copier.jobs.give_up(1)
    (result,) = ended(copier, 1)
    copier.close()
    assert result.ok


def test_close_cancels_what_has_not_begun(world: World, kind: str) -> None:
    host = MemoryHost(world.layout, 8)
    copier = open_copier(kind, world, host)
    keys = keys_of(2)
    for slot, key in enumerate(keys):
        host.put(slot, key, table.RESERVED)
    copier.jobs.submit(job_of(LOAD, onto(4), keys))
    copier.close()
    (result,) = copier.jobs.poll()
    assert result.outcomes == [Outcome.CANCELLED] * 2
    copier.jobs.submit(job_of(LOAD, onto(4), keys, id=2))
    assert [late.outcomes for late in copier.jobs.poll()] == [[Outcome.CANCELLED] * 2]


def test_a_slot_that_is_not_there_is_a_failure_not_an_exception(
    copier: DeviceCopier, host: MemoryHost, caplog: pytest.LogCaptureFixture
) -> None:
    keys = filled(copier, host, 1)
    host.entries.append(host.entries[0])
    (result,) = run(copier, job_of(LOAD, onto(2), keys, slots=[8]))
    assert not result.ok
    assert run(copier, job_of(LOAD, onto(2), keys))[0].ok, "and the next job is served"


class Faulty(MemoryHost):
    """Raises what nobody expects of it as soon as a thread looks at a slot."""

    faulty = ""
    error: Exception = struct.error("unpack requires a buffer of 16 bytes")

    def state(self, slot: int) -> int:
        self._look("state")
        return super().state(slot)

    def entry(self, slot: int) -> bytes:
        self._look("entry")
        return super().entry(slot)

    @property
    def data(self) -> memoryview:
        self._look("data")
        return super().data

    def record(self, slot: int) -> memoryview:
        self._look("data")
        return super().record(slot)

    def _look(self, at: str) -> None:
        if at == self.faulty:
            raise self.error


@pytest.mark.parametrize(
    ("way", "at", "error"),
    [
        (LOAD, "state", struct.error("unpack requires a buffer of 16 bytes")),
        (LOAD, "entry", AssertionError("this cannot be")),
        (LOAD, "data", ctypes.ArgumentError("wrong type")),
        (STORE, "entry", struct.error("unpack requires a buffer of 16 bytes")),
        (STORE, "data", OverflowError("int too large to convert to C long")),
    ],
)
def test_whatever_a_thread_raises_fails_its_job_alone(
    world: World, kind: str, way: TransferKind, at: str, error: Exception
) -> None:
    """The engine waits for jobs: one that a dead thread had would hang it."""
    host = Faulty(world.layout, 8)
    copier = open_copier(kind, world, host)
    keys = filled(copier, host, 2)
    if way is STORE:
        host.put(1, keys[1], table.RESERVED)
    host.faulty, host.error = at, error
    (result,) = run(copier, job_of(way, onto(2), keys[1:], slots=[1]))
    assert result.outcomes == [Outcome.IO_ERROR]
    host.faulty = ""
    assert run(copier, job_of(LOAD, onto(2), keys[:1]))[0].ok, "and the next job is served"
    copier.close()


class Gated(MemoryHost):
    """Holds the thread that looks at one slot's entry until it is opened."""

    def __init__(self, layout: DeviceLayout, slots: int) -> None:
        super().__init__(layout, slots)
        self.held, self.reached, self.gate = -1, threading.Event(), threading.Event()

    def entry(self, slot: int) -> bytes:
        if slot == self.held:
            self.reached.set()
            self.gate.wait()
        return super().entry(slot)


def hanging_store(copier: DeviceCopier, host: Gated) -> list[BlockKey]:
    """A thread has a store of slot 1, and does not come back."""
    keys = filled(copier, host, 2)
    host.put(1, keys[1], table.RESERVED)
    host.held = 1
    copier.jobs.submit(job_of(STORE, onto(2), keys[1:], slots=[1], id=2))
    assert host.reached.wait(60)
    return keys


def test_the_engine_waits_for_no_store_for_ever(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on and writes to the pages. Whatever the thread then says of its copy, it is none;
    and its slot is nobody else's before."""
    host = Gated(world.layout, 8)
    copier = open_copier(kind, world, host)
    keys = hanging_store(copier, host)
    with monkeypatch.context() as patch:
        patch.setattr(JobQueue, "_WAIT_S", 0.0)
        copier.jobs.wait([2])
    world.memory[:] = 0
    assert copier.jobs.poll() == [], "the thread may still write to the slot"
    assert "given up" in caplog.text
    copier.jobs.submit(job_of(LOAD, onto(2), keys[:1], id=3))
    copier.jobs.wait([3])
    assert [each.outcomes for each in copier.jobs.poll()] == [[Outcome.CANCELLED]], (
        "it is not to hang"
    )
    host.gate.set()
    assert ended(copier, 2)[0].outcomes == [Outcome.DROPPED]
    assert run(copier, job_of(LOAD, onto(2), keys[:1]))[0].ok
    copier.close()


def test_close_does_not_wait_for_a_thread_for_ever(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (cpu_copier, cuda_copier):
        monkeypatch.setattr(module, "CLOSE_S", 0.01)
    host, released = Gated(world.layout, 8), list[bool]()
    memory = FakeMemory(close=lambda: released.append(True))
    more = {} if kind == "cpu" else {"memory": memory}
    copier = open_copier(kind, world, host, **more)
    hanging_store(copier, host)
    copier.close()
    assert "has not ended" in caplog.text
    assert not released, "the thread may still use what would be released"
    host.gate.set()
    ended(copier, 2)
