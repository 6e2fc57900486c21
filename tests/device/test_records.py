"""What verifies a record, and seals it, on its way between a device and host memory."""

from __future__ import annotations

import numpy as np
import pytest
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of

from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.device.queue import Busy
from kvtier.device.records import RankRecords
from kvtier.record.record import CODEC_RAW, Header, put_sum
from kvtier.slab import layout as table
from kvtier.types import Outcome, block_key

PAGE = 512
LAYOUT = DeviceLayout((DeviceTensor(0, 4, PAGE, PAGE),), ((PageRef(0, PAGE),),), 2, 1, 2)
"""Of the second of two ranks."""
KEY, OTHER = keys_of(2)


@pytest.fixture
def host() -> MemoryHost:
    return MemoryHost(LAYOUT, 1)


@pytest.mark.parametrize(
    ("header", "fits"),
    [
        (Header(KEY, NAMESPACE, 4 * PAGE, 2), True),
        (Header(OTHER, NAMESPACE, 4 * PAGE, 2), False),
        (Header(KEY, bytes(16), 4 * PAGE, 2), False),
        (Header(KEY, NAMESPACE, 2 * PAGE, 2), False),
        (Header(KEY, NAMESPACE, 4 * PAGE, 4), False),
        (Header(KEY, NAMESPACE, 4 * PAGE, 2, CODEC_RAW + 1), False),
    ],
    ids=["all", "key", "namespace", "size", "parts", "codec"],
)
def test_all_that_a_header_says_must_fit(host: MemoryHost, header: Header, fits: bool) -> None:
    header.write(host.record(0))
    host.put(0, KEY, table.VALID)
    records = RankRecords(LAYOUT, host, NAMESPACE).find([0], [KEY], 0)
    assert records.fit.tolist() == [fits]


@pytest.mark.parametrize(
    ("state", "generation", "same"),
    [
        (table.VALID, 1, True),
        (table.ARRIVED, 1, True),
        (table.VALID, 2, False),
        (table.FREE, 1, False),
        (table.BAD, 1, False),
        (table.FAILED, 1, False),
        (table.RESERVED, 1, False),
    ],
)
def test_a_slot_that_was_given_up_or_to_others_has_changed(
    host: MemoryHost, state: int, generation: int, same: bool
) -> None:
    host.put(0, KEY, table.VALID)
    found = RankRecords(LAYOUT, host, NAMESPACE).find([0], [KEY], 0)
    host.put(0, KEY, state, generation)
    copied = np.array([True])
    assert found.outcomes(copied, copied) == [Outcome.OK if same else Outcome.GONE]


def test_a_block_that_others_use_meanwhile_is_still_the_same(host: MemoryHost) -> None:
    host.put(0, KEY, table.VALID)
    found = RankRecords(LAYOUT, host, NAMESPACE).find([0], [KEY], 0)
    before = host.entry(0)
    uses = table.add_uses(before, 1, at=1_000_000)
    after = table.USES_AT + len(uses)
    host.entries[0] = before[: table.USES_AT] + uses + before[after:]
    assert host.entry(0) != before
    copied = np.array([True])
    assert found.outcomes(copied, copied) == [Outcome.OK]


def test_each_record_of_a_batch_is_looked_at_by_itself() -> None:
    """Keys of two lengths, one of which begins with the other; one is in the wrong slot."""
    short, long = block_key(bytes(8)), block_key(bytes(16))
    host = MemoryHost(LAYOUT, 4)
    for slot, key in enumerate((short, long, long, short)):
        Header(key, NAMESPACE, 4 * PAGE, 2).write(host.record(slot))
        put_sum(host.record(slot), 1, slot)
        host.put(slot, key, table.VALID)
    host.put(3, short, table.FAILED)
    records = RankRecords(LAYOUT, host, NAMESPACE)
    found = records.find([1, 0, 2, 3], [long, short, short, short], 0)
    assert found.stated.tolist() == [1, 0, 2, 3]
    assert found.fit.tolist() == [True, True, False, False]
    right, copied = found.fit.copy(), np.array([True, False, False, False])
    outcomes = [Outcome.OK, Outcome.CANCELLED, Outcome.GONE, Outcome.IO_ERROR]
    assert found.outcomes(right, copied) == outcomes
    right[0] = copied[0] = False
    assert found.outcomes(right, copied)[0] is Outcome.CORRUPT
    assert found.outcomes(right, right, moved=False)[:2] == [Outcome.CORRUPT, Outcome.IO_ERROR]
    for slot in (-1, 4):
        with pytest.raises(IndexError):
            records.find([slot], [short], 0)


def test_a_record_is_sealed_where_its_slot_waits_for_it(host: MemoryHost) -> None:
    """By the second rank, which leaves the header to the first."""
    records = RankRecords(LAYOUT, host, NAMESPACE)
    for key, state in ((KEY, table.VALID), (KEY, table.FREE), (OTHER, table.RESERVED)):
        host.put(0, key, state)
        assert records.seal(0, KEY, 0) is Outcome.GONE
        assert not any(host.record(0)), "nothing was written"
    for checksum, right in ((None, True), (7, False)):  # the latter somebody has taken already
        host.put(0, KEY, table.RESERVED)
        assert records.seal(0, KEY, 0, checksum) is Outcome.OK
        host.put(0, KEY, table.VALID)
        assert not records.find([0], [KEY], 0).fit[0] or checksum, "it has no header yet"
        Header(KEY, NAMESPACE, 4 * PAGE, 2).write(host.record(0))
        assert records.find([0], [KEY], 0).verified().tolist() == [right]


def test_what_overlaps_counts_once() -> None:
    busy = Busy()
    busy.count(10.0, 2)
    busy.count(11.0, 1)
    busy.count(13.0, -2)
    assert busy.running == 1
    busy.count(14.0, -1)
    busy.count(20.0, 1)
    busy.count(20.5, -1)
    assert (busy.running, busy.seconds) == (0, 4.5)


def test_what_only_waits_for_the_engine_does_not_count() -> None:
    """The wait is none of the link's: it would look many times slower than it is."""
    busy, now = Busy(), 10.0
    busy.count(10.0, 2)
    busy.count(11.0, 1)
    with busy.waiting(2, lambda: now):
        now = 12.0
        with busy.waiting(1, lambda: now):
            now = 20.0
        now = 21.0
    assert busy.running == 3
    busy.count(22.0, -3)
    assert (busy.running, busy.seconds) == (0, 4.0)
