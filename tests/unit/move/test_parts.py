"""The small parts of a mover: staging buffers, batches, and what is written down."""

from __future__ import annotations

import ctypes
import threading
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kvtier.interfaces.mover import Transfer, TransferKind
from kvtier.move.queues import HandlerQueue, StagingPool, TransferBatch, TransferJob
from kvtier.move.threads import TransferCounts
from kvtier.record.record import ALIGN, record_bytes
from kvtier.testing.subject import make_keys
from kvtier.types import Outcome, SlotSpec


def make_transfer(blocks: int, *, source: int = 1, target: int = 0, id: int = 1) -> Transfer:
    spec = SlotSpec(list(range(blocks)))
    return Transfer(
        id=id,
        kind=TransferKind.LOAD if target == 0 else TransferKind.STORE,
        source=source,
        target=target,
        keys=make_keys(blocks),
        source_spec=spec,
        target_spec=spec,
        deadline=1000.0,
    )


def make_lane(staging: StagingPool, concurrency: int = 4, batch_blocks: int = 8) -> HandlerQueue:
    return HandlerQueue(threading.Lock(), concurrency, batch_blocks, staging)


def sizes(lane: HandlerQueue) -> list[int]:
    """How long the batches are that this lane gives out."""
    found = []
    while (batch := lane.take(0.0)) is not None:
        found.append(batch.stop - batch.start)
    return found


class TestStaging:
    def test_buffers_are_aligned_apart_and_bounded(self) -> None:
        size = record_bytes(100)
        pool = StagingPool(size, room=5 * size + 1)
        assert pool.count == pool.free == 5
        buffers = pool.take(3) + pool.take(2)
        starts = sorted(ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in buffers)
        assert all(start % ALIGN == 0 for start in starts)
        assert all(after - start == size for start, after in pairwise(starts))
        assert pool.free == 0
        pool.give(buffers)
        assert pool.free == 5

    def test_records_larger_than_the_room_still_pass(self) -> None:
        assert StagingPool(1 << 20, room=4096).count == 2


class TestLane:
    def test_a_lone_job_is_spread_over_all_threads_down_to_its_end(self) -> None:
        lane = make_lane(StagingPool(4096))
        lane.add(TransferJob(make_transfer(20), (1,), 8, 0.0))
        assert sizes(lane) == [5, 4, 3, 2, 2, 1, 1, 1, 1]

    def test_jobs_that_others_wait_behind_go_in_whole_batches(self) -> None:
        lane = make_lane(StagingPool(4096))
        for id in (1, 2):
            lane.add(TransferJob(make_transfer(16, id=id), (1,), 8, 0.0))
        assert sizes(lane)[:2] == [8, 8]

    def test_jobs_without_staging_buffers_are_passed_over(self) -> None:
        staging = StagingPool(4096, room=2 * 4096)
        lane = make_lane(staging, concurrency=1)
        staged = TransferJob(make_transfer(5, source=1, target=2, id=1), (1, 2), 8, 0.0)
        lane.add(staged)
        first = lane.take(0.0)
        assert first is not None
        assert (first.stop, len(first.buffers)) == (2, 2)
        assert lane.take(0.0) is None
        direct = TransferJob(make_transfer(1, source=0, target=1, id=2), (1,), 8, 0.0)
        lane.add(direct)
        found = lane.take(0.0)
        assert found is not None
        assert found.job is direct
        staging.give(first.buffers)
        second = lane.take(0.0)
        assert second is not None
        assert second.job is staged


def test_a_batch_knows_what_has_come_through() -> None:
    job = TransferJob(make_transfer(6), (1,), 8, 0.0)
    job.outcomes[1:6] = [
        Outcome.OK,
        Outcome.OK,
        Outcome.CORRUPT,
        Outcome.OK,
        Outcome.OK,
    ]
    batch = TransferBatch(job, 1, 5, None)
    assert batch.moved() == [(0, 2), (3, 4)]
    batch.spoil(Outcome.TIMEOUT)
    assert batch.moved() == []
    assert job.outcomes[3:] == [Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.OK]


def test_busy_time_is_counted_once_however_many_threads_are_busy() -> None:
    job = TransferJob(make_transfer(6), (1,), 2, 10.0)
    job.cut(2, 11.0)
    job.cut(2, 12.0)
    job.settle(14.0)
    job.settle(15.0)
    job.cut(2, 20.0)
    job.settle(21.0)
    assert job.ended
    assert job.busy_seconds == 5.0


class TestBooks:
    def test_a_relay_takes_room_at_both_ends_until_it_ends(self) -> None:
        books = TransferCounts([True, False, False], [0, 10, 5])
        assert not books.admit(make_transfer(6, source=1, target=2))
        relay = make_transfer(5, source=1, target=2)
        assert books.admit(relay) == (1, 2)
        for target, room in ((1, 5), (2, 0)):
            assert not books.admit(make_transfer(room + 1, source=0, target=target))
        before = books.stats()
        books.release(relay, [Outcome.TIMEOUT] * 5)
        assert (before.in_flight_blocks, before.timeouts) == (5, 0), "as it was then"
        assert (books.stats().in_flight_blocks, books.stats().timeouts) == (0, 1)
        assert books.admit(make_transfer(10, source=0, target=1))
        assert books.admit(make_transfer(5, source=0, target=2))

    @pytest.mark.parametrize(
        "change",
        [
            {"source_spec": SlotSpec([0])},
            {"target_spec": SlotSpec([0])},
            {"keys": make_keys(3)},
            {"source": 0},
            {"source": -1},
            {"target": -1},
            {"source": 2},
            {"target": 2},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_what_makes_no_sense_is_not_taken_in(self, change: dict[str, Any]) -> None:
        books = TransferCounts([True, False], None)
        with pytest.raises(ValueError, match="transfer 1 "):
            books.admit(msgspec.structs.replace(make_transfer(2), **change))
        assert books.stats().in_flight_blocks == 0
