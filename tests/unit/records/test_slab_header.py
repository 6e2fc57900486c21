"""A slab's header page: all that is read from a disk before anything else is believed."""

from __future__ import annotations

import msgspec
import pytest

from kvtier.errors import FormatError, NewerFormat
from kvtier.slab.layout import SLOT_BYTES_MAX, SLOTS_MAX, TABLE_AT, SlabHeader, ends_first

HEADER = SlabHeader(slots=8, slot_bytes=12288, data_at=8192, slab_id=3, namespace=bytes(range(16)))


def page(header: SlabHeader = HEADER) -> bytearray:
    return bytearray(header.pack().ljust(TABLE_AT, b"\0"))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"slots": 1},
        {"slots": SLOTS_MAX},
        {"slot_bytes": 4096},
        {"slot_bytes": SLOT_BYTES_MAX},
        {"flags": 1},
    ],
)
def test_what_was_written_is_read(change: dict[str, int]) -> None:
    header = msgspec.structs.replace(HEADER, **change)
    assert SlabHeader.unpack(page(header)) == header


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0},
        {"slots": SLOTS_MAX + 1},
        {"slot_bytes": 0},
        {"slot_bytes": 4097},
        {"slot_bytes": SLOT_BYTES_MAX + 4096},
    ],
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(FormatError, match="inconsistent"):
        SlabHeader.unpack(page(msgspec.structs.replace(HEADER, **change)))


def test_a_flip_anywhere_is_found() -> None:
    whole = page()
    written = len(HEADER.pack().rstrip(b"\0"))
    for at in range(written):
        whole[at] ^= 1
        with pytest.raises(FormatError):
            SlabHeader.unpack(whole)
        whole[at] ^= 1
    assert SlabHeader.unpack(whole) == HEADER


def test_other_files_other_versions_and_pages_cut_short() -> None:
    for at, error, said in ((0, FormatError, "not a kvtier slab"), (8, NewerFormat, "version")):
        other = page()
        other[at] += 1
        with pytest.raises(error, match=said):
            SlabHeader.unpack(other)
    with pytest.raises(FormatError, match="cut short"):
        SlabHeader.unpack(page()[:-1])


def test_of_what_was_used_at_one_time_the_last_goes_first() -> None:
    times = [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert ends_first([7, 8, 3, 4, 5, 9], times) == [8, 7, 3, 9, 5, 4]
    assert ends_first([], []) == []
