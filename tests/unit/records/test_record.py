"""The record's checksums: what stands on media must be what every later version takes, too."""

from __future__ import annotations

import contextlib
import re
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import FormatError
from kvtier.record.record import (
    CODEC_RAW,
    HEADER_BYTES,
    PIECE_BYTES,
    VERSION,
    Header,
    PartSum,
    part_sum,
    pieces_of,
    record_bytes,
    seal,
    verify,
    verify_header,
)
from kvtier.types import (
    GROUP_BYTES,
    GROUPS_MAX,
    KEY_BYTES_MAX,
    PARTS_MAX,
    PAYLOAD_BYTES_MAX,
    BlockKey,
    Namespace,
    Outcome,
    block_key,
)

NAMESPACE = bytes(16)


def pattern(size: int) -> memoryview:
    return memoryview((np.arange(size, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8).data)


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (1, 1),
        (PIECE_BYTES, 1),
        (PIECE_BYTES + 1023, 1),
        (PIECE_BYTES + 1024, 2),
        (2 * PIECE_BYTES + 1023, 2),
        (2 * PIECE_BYTES + 1024, 3),
        (5 * PIECE_BYTES, 5),
    ],
)
def test_no_piece_is_tiny_and_none_much_longer_than_others(size: int, pieces: int) -> None:
    assert pieces_of(size) == pieces


def test_the_checksum_of_several_pieces_is_that_of_their_checksums() -> None:
    part = pattern(2 * PIECE_BYTES + 5000)
    cuts = [part[:PIECE_BYTES], part[PIECE_BYTES : 2 * PIECE_BYTES], part[2 * PIECE_BYTES :]]
    joined = b"".join(xxhash.xxh3_64_intdigest(cut).to_bytes(8, "little") for cut in cuts)
    assert part_sum(part) == xxhash.xxh3_64_intdigest(joined)


@pytest.mark.parametrize("size", [4096, PIECE_BYTES, PIECE_BYTES + 1023, 2 * PIECE_BYTES + 1024])
@pytest.mark.parametrize("strip", [1 << 20, PIECE_BYTES - 4096, 5 * PIECE_BYTES])
def test_a_checksum_is_the_same_in_strips(size: int, strip: int) -> None:
    part, total = pattern(size), PartSum(size)
    for start in range(0, size, strip):
        total.add(part[start : start + strip])
    assert total.value() == part_sum(part)


@pytest.mark.parametrize(
    ("size", "checksum"),
    [
        (4096, 0x2584629371EA1D8F),
        (PIECE_BYTES, 0xF1AF777BED2F7661),
        (3 * PIECE_BYTES + 4096, 0xC5326B8DF3BCFE21),
    ],
)
def test_checksums_stay_what_they_are(size: int, checksum: int) -> None:
    """If this fails, the version of records has to change, and with it no namespace meets an old
    record."""
    assert part_sum(pattern(size)) == checksum


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 4095])
def test_a_flip_in_any_piece_is_found(parts: int, at: int) -> None:
    payload = parts * (3 * PIECE_BYTES + 4096)
    record = memoryview(bytearray(record_bytes(payload)))
    record[HEADER_BYTES : HEADER_BYTES + payload] = pattern(payload)
    key = block_key(b"block")
    seal(record, Header(key, NAMESPACE, payload, parts))
    assert verify(record, key, NAMESPACE) is Outcome.OK
    record[HEADER_BYTES + at] ^= 1
    assert verify(record, key, NAMESPACE) is Outcome.CORRUPT


@given(
    key=st.binary(min_size=1, max_size=40),
    payload=st.one_of(st.integers(0, 8192), st.integers(0, (1 << 64) - 1)),
    parts=st.integers(0, (1 << 32) - 1) | st.integers(0, 4),
    codec=st.integers(0, 3),
    room=st.sampled_from([0, 4095, 4096, 4097, 8192, 12288]),
)
def test_a_header_that_somebody_made_up_is_refused(
    key: bytes, payload: int, parts: int, codec: int, room: int
) -> None:
    record = memoryview(bytearray(max(room, HEADER_BYTES)))
    Header(BlockKey(key), NAMESPACE, payload, parts, codec).write(record)
    assert verify(record[:room], BlockKey(key), NAMESPACE) is Outcome.CORRUPT or payload == 0


KEY = block_key(b"somebody's prompt", 0)


def written(key: BlockKey, parts: int, codec: int = CODEC_RAW) -> memoryview:
    record = memoryview(bytearray(HEADER_BYTES + 4096))
    seal(record, Header(key, NAMESPACE, 4096, parts, codec))
    return record


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"X", "not a kvtier block record"),
        (8, struct.pack("<H", VERSION + 1), f"record version {VERSION + 1}"),
        (11, b"\0", "inconsistent"),
        (11, bytes([GROUP_BYTES]), "inconsistent"),
        (11, bytes([KEY_BYTES_MAX + 1]), "inconsistent"),
        (12, struct.pack("<I", 0), "inconsistent"),
        (12, struct.pack("<I", PARTS_MAX + 1), "inconsistent"),
        (12, struct.pack("<I", 3), "inconsistent"),
    ],
)
def test_what_a_header_must_not_say_even_if_its_checksum_is_right(
    at: int, value: bytes, said: str
) -> None:
    record = written(KEY, 2)
    assert verify(record, KEY, NAMESPACE).ok
    record[at : at + len(value)] = value
    fixed = record[: 48 + KEY_BYTES_MAX]
    struct.pack_into("<Q", record, len(fixed), xxhash.xxh3_64_intdigest(fixed))
    with pytest.raises(FormatError, match=said):
        Header.read(record)
    assert verify(record, KEY, NAMESPACE) is Outcome.CORRUPT


def test_a_payload_that_the_room_cuts_short_is_refused_although_its_checksum_fits() -> None:
    record = memoryview(bytearray(HEADER_BYTES + 4096))
    seal(record, Header(KEY, NAMESPACE, 8192))
    assert verify(record, KEY, NAMESPACE) is Outcome.CORRUPT


def test_a_flip_anywhere_in_a_header_is_found() -> None:
    record = written(KEY, 2)
    for at in range(48 + KEY_BYTES_MAX + 8):
        record[at] ^= 1
        with pytest.raises(FormatError):
            Header.read(record)
        record[at] ^= 1
    assert verify(record, KEY, NAMESPACE).ok


def test_the_longest_key_and_as_many_parts_as_there_may_be() -> None:
    key = BlockKey(bytes(range(KEY_BYTES_MAX)))
    record = written(key, PARTS_MAX)
    assert Header.read(record).key == key
    assert verify(record, key, NAMESPACE).ok


@pytest.mark.parametrize(
    ("parts", "good"), [(1, True), (2, True), (16, True), (3, False), (0, False)]
)
def test_where_the_namespace_has_no_number_of_parts_the_header_says_it(
    parts: int, good: bool
) -> None:
    record = memoryview(bytearray(HEADER_BYTES + 4096))
    Header(KEY, NAMESPACE, 4096, parts).write(record)
    assert verify_header(record, KEY, NAMESPACE, 4096, None).ok is good
    assert not verify_header(record, KEY, NAMESPACE, 2048, None).ok
    assert not verify_header(record, block_key(b"another"), NAMESPACE, 4096, None).ok
    record[12] ^= 1
    assert not verify_header(record, KEY, NAMESPACE, 4096, None).ok


def test_a_namespace_without_a_number_of_parts_is_one_of_its_own() -> None:
    of_two = Namespace(facts={"model": "m"}, group_bytes=(4096,), parts=2)
    of_any = Namespace(facts={"model": "m"}, group_bytes=(4096,), parts=None)
    assert Namespace.from_json(of_any.to_json()) == of_any
    assert of_any.digest != of_two.digest
    assert [str(each) for each in of_any.differences(of_two)] == ["parts: any here, 2 there"]


def test_compressed_bytes_are_never_taken_for_the_payload() -> None:
    record = written(KEY, 1, codec=CODEC_RAW + 1)
    assert Header.read(record).codec == CODEC_RAW + 1
    assert verify(record, KEY, NAMESPACE) is Outcome.CORRUPT


@given(cut=st.integers(0, 200), junk=st.binary(max_size=8))
def test_a_description_that_is_none_is_an_error_of_one_kind(cut: int, junk: bytes) -> None:
    whole = Namespace(facts={"model": "m"}, group_bytes=(4096,), parts=1).to_json()
    with contextlib.suppress(msgspec.ValidationError):
        Namespace.from_json(whole[:cut] + junk)


@pytest.mark.parametrize("fact", [b'"\xff": "m"', b'"model": "\xff"', b'"model": "\\ud800"'])
def test_so_is_one_that_is_no_text(fact: bytes) -> None:
    whole = Namespace(facts={"model": "m"}, group_bytes=(4096,)).to_json()
    with pytest.raises(msgspec.ValidationError):
        Namespace.from_json(whole.replace(b'"model": "m"', fact))


@pytest.mark.parametrize("value", [32, None, ["a"]])
def test_facts_that_are_no_texts_are_refused(value: Any) -> None:
    """What is written down for them could not be read again, so that no command would know it."""
    with pytest.raises(ValueError, match=f"write {re.escape(repr(str(value)))}"):
        Namespace(facts={"model": "m", "layers": value}, group_bytes=(4096,))


def test_no_description_asks_for_more_than_any_block_has() -> None:
    most = Namespace(facts={}, group_bytes=(1, PAYLOAD_BYTES_MAX))
    assert Namespace.from_json(most.to_json()) == most
    text = most.to_json().replace(b"%d" % PAYLOAD_BYTES_MAX, b"%d" % (1 << 62))
    with pytest.raises(msgspec.ValidationError, match="let a block hold fewer tokens"):
        Namespace.from_json(text)


def test_no_description_asks_for_more_keys_than_a_model_has_groups() -> None:
    most = Namespace(facts={}, group_bytes=(1,) * GROUPS_MAX)
    assert Namespace.from_json(most.to_json()) == most
    with pytest.raises(msgspec.ValidationError, match="cache groups"):
        Namespace.from_json(most.to_json().replace(b"[", b"[1, "))
