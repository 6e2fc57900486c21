"""Direct reads against a driver that fails in every way a real one can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, keys_of
from support.device.fake_cufile import FakeCufile, FakeStage

from kvtier.device.direct import DirectLoader, DirectRead
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.record.record import HEADER_BYTES, Header, record_bytes, seal_part
from kvtier.types import FilePlace, Outcome

PART = 5000
"""No multiple of 4 KiB: parts of later ranks begin anywhere."""


class Stage:
    """Two records of two ranks in a file, and the second rank's loader."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        tensors = (DeviceTensor(0, 4, PART, PART),)
        self.layout = DeviceLayout(tensors, ((PageRef(0, PART),),), 1, part=1, parts=2)
        self.size = record_bytes(2 * PART)
        self.keys = keys_of(2)
        self.path = folder / "slab"
        self.records = bytearray(2 * self.size)
        for index, key in enumerate(self.keys):
            self.write(index, key)
        self.driver = FakeCufile()
        self.loader = DirectLoader(
            self.layout, self.driver, NAMESPACE, stages=2,
            clock=lambda: self.now, sleep=self.sleep,
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def write(self, index: int, key: Any, payload: int = 0) -> None:
        record = memoryview(self.records)[index * self.size : (index + 1) * self.size]
        Header(key, NAMESPACE, 2 * PART, 2).write(record)
        random = np.random.default_rng(index + payload).integers(0, 256, 2 * PART, np.uint8)
        record[HEADER_BYTES : HEADER_BYTES + 2 * PART] = random.data
        for part in range(2):
            at = HEADER_BYTES + part * PART
            seal_part(record, part, record[at : at + PART])
        self.path.write_bytes(self.records)

    def flip(self, at: int) -> None:
        self.records[at] ^= 1
        self.path.write_bytes(self.records)

    def read(self, index: int = 0) -> DirectRead:
        return DirectRead(FilePlace(str(self.path), index * self.size), self.keys[index], 0)

    def outcome(self, index: int = 0) -> Outcome:
        read = self.read(index)
        self.loader.begin(read)
        outcome = self.loader.end(read, deadline=self.now + 1)
        if outcome.ok:
            self.loader.give_back(read)
        return outcome


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_part_lies_where_the_read_says(stage: Stage) -> None:
    reads = [stage.read(index) for index in range(2)]
    for read in reads:
        stage.loader.begin(read)
    for index, read in enumerate(reads):
        assert stage.loader.end(read, stage.now + 1).ok
        assert isinstance(read.stage, FakeStage)
        at = read.record + HEADER_BYTES + PART - read.stage.address
        found = bytes(read.stage.buffer[at : at + PART])
        start = index * stage.size + HEADER_BYTES + PART
        assert found == bytes(stage.records[start : start + PART])
        stage.loader.give_back(read)
    assert stage.loader.free == 2
    assert stage.driver.open_files == 0


@pytest.mark.parametrize("at", [3, 70, 136, HEADER_BYTES + PART, HEADER_BYTES + 2 * PART - 1])
def test_a_flipped_bit_is_found(stage: Stage, at: int) -> None:
    stage.flip(at)
    assert stage.outcome() is Outcome.CORRUPT
    assert stage.loader.free == 2


def test_the_other_ranks_part_is_the_other_ranks_concern(stage: Stage) -> None:
    stage.flip(HEADER_BYTES)
    assert stage.outcome() is Outcome.OK


def test_a_slot_given_to_another_key_is_refused(stage: Stage) -> None:
    stage.write(0, stage.keys[1])
    assert stage.outcome() is Outcome.CORRUPT


def test_a_slot_rewritten_after_the_read_does_not_prove_what_was_read(stage: Stage) -> None:
    stage.driver.after_read = lambda: stage.write(0, stage.keys[0], payload=9)
    assert stage.outcome() is Outcome.CORRUPT


def test_a_read_that_hangs_times_out_and_keeps_its_buffer_and_file(stage: Stage) -> None:
    stage.driver.hangs = True
    assert stage.outcome() is Outcome.TIMEOUT
    assert stage.loader.free == 1, "the device may still write to the buffer"
    assert stage.driver.open_files == 1
    stage.driver.hangs = False
    assert stage.loader.free == 2
    assert stage.driver.open_files == 0


def test_what_hangs_outlives_its_loader(stage: Stage) -> None:
    stage.driver.hangs = True
    assert stage.outcome() is Outcome.TIMEOUT
    stage.loader.close()
    assert [each() is not None for each in stage.driver.made].count(True) == 1
    assert not stage.driver.released, "the driver may still write there"


def test_a_loader_that_closes_takes_back_what_it_told_the_driver(stage: Stage) -> None:
    assert stage.outcome() is Outcome.OK
    stage.loader.close()
    assert stage.driver.released
