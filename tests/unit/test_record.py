"""The record's checksums: what stands on media must be what every later version takes, too."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvtier.core.record import (
    HEADER_BYTES,
    PIECE_BYTES,
    Header,
    part_sum,
    pieces_of,
    record_bytes,
    seal,
    verify,
)
from kvtier.types import Outcome, block_key

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
