"""What is done to one record: noise that nobody meant, and lies whose header is well formed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

import xxhash

from campaign.damage.specimens import FOREIGN, NAMESPACE
from kvtier.record.record import HEADER_BYTES

Record = memoryview
Damage = Callable[[random.Random, Record, Sequence[bytes]], None]
SECTOR = 512

# Header of docs/reference/format.md; written out here, so that a mistake in kvtier's own
# description of it cannot hide in this one.
_SUM_AT = 88
_FIELDS = {
    "version": (8, "<H"),
    "codec": (10, "<B"),
    "key length": (11, "<B"),
    "parts": (12, "<I"),
    "payload bytes": (16, "<Q"),
    "stored bytes": (24, "<Q"),
}
_ODD = (0, 1, 2, 3, 7, 255, 4096, 4608, 8192, 8191, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 63)


def flip_bit(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """Of header, checksums or payload: half of them in the header, which is small."""
    end = HEADER_BYTES if dice.random() < 0.5 else len(record)
    at = dice.randrange(160 if end == HEADER_BYTES else end)
    record[at] ^= 1 << dice.randrange(8)


def some_noise(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    at = dice.randrange(len(record))
    noise = dice.randbytes(min(dice.choice((2, 8, 64, SECTOR, 4096)), len(record) - at))
    record[at : at + len(noise)] = noise


def zero_sectors(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    at = dice.randrange(len(record) // SECTOR) * SECTOR
    size = min(dice.choice((1, 2, 8)) * SECTOR, len(record) - at)
    record[at : at + size] = bytes(size)


def torn(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """The first sectors of this record, the rest of another."""
    other = dice.choice(others)
    cut = min(dice.randrange(1, len(record) // SECTOR) * SECTOR, len(other))
    end = min(len(record), len(other))
    record[cut:end] = other[cut:end]


def another(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """A whole record of another key, of earlier, or of another namespace, here."""
    other = dice.choice(others)[: len(record)]
    record[: len(other)] = other


def anothers_payload(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """The right header, over another's payload."""
    other = dice.choice(others)[HEADER_BYTES : len(record)]
    record[HEADER_BYTES : HEADER_BYTES + len(other)] = other


def shifted(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """The same bytes, some further on."""
    by = dice.choice((1, 2, 8, SECTOR, 4096))
    start = dice.choice((0, HEADER_BYTES))
    moved = bytes(record[start : len(record) - by])
    record[start + by :] = moved


def swapped_pieces(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """Two sectors of the payload change places: a sum that only adds up would not see it."""
    first, second = (
        HEADER_BYTES + dice.randrange((len(record) - HEADER_BYTES) // SECTOR) * SECTOR
        for _ in range(2)
    )
    kept = bytes(record[first : first + SECTOR])
    record[first : first + SECTOR] = record[second : second + SECTOR]
    record[second : second + SECTOR] = kept


def lie(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """One field of the header is another, and the header's checksum is right again."""
    name = dice.choice([*_FIELDS, "key", "namespace"])
    if name == "key":
        at = 48 + dice.randrange(36)
        record[at] ^= 1 << dice.randrange(8)
    elif name == "namespace":
        record[32:48] = FOREIGN.digest if dice.random() < 0.5 else dice.randbytes(16)
    else:
        at, form = _FIELDS[name]
        size = struct.calcsize(form)
        value = dice.choice((*_ODD, dice.randrange(1 << 64)))
        struct.pack_into(form, record, at, value & ((1 << 8 * size) - 1))
    struct.pack_into("<Q", record, _SUM_AT, xxhash.xxh3_64_intdigest(record[:_SUM_AT]))


def shorter(dice: random.Random, record: Record, others: Sequence[bytes]) -> None:
    """A wrong length, with fewer or more parts."""
    payload = dice.choice((4096, 4608, 8192, 8192 + 4096, 512))
    struct.pack_into("<IQQ", record, 12, dice.choice((1, 2, 4, 8)), payload, payload)
    struct.pack_into("<Q", record, _SUM_AT, xxhash.xxh3_64_intdigest(record[:_SUM_AT]))


NOISE: tuple[Damage, ...] = (
    *(flip_bit, some_noise, zero_sectors, torn, another),
    *(anothers_payload, shifted, swapped_pieces),
)
"""A record whose proved bytes this has changed must not be served."""
LIES: tuple[Damage, ...] = (lie, shorter)
"""May leave all that counts as it is: what is served must still be right."""
assert NAMESPACE.digest != FOREIGN.digest
