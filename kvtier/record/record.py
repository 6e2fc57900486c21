"""The block record: a 4 KiB header in front of every payload, the same on every medium.

docs/reference/format.md states the layout. The header proves whose bytes follow; the payload is
proved by one xxh3 checksum a part, so that each rank writes and verifies its own part alone. That
of a part of several pieces is the checksum of theirs: a GPU takes those of all pieces at once.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import xxhash

from kvtier.errors import FormatError
from kvtier.types import GROUP_BYTES, KEY_BYTES_MAX, PARTS_MAX, BlockKey, Outcome

MAGIC = b"KVTBLK\r\n"
VERSION = 2
HEADER_BYTES = 4096
ALIGN = 4096
"""Of records in files and memory: what direct I/O asks for. Devices are not asked: where a file
system refuses direct I/O at this alignment, files are read and written through its cache."""
CODEC_RAW = 0
PIECE_BYTES = 2 << 20
TAIL_BYTES = 1024
"""A rest of fewer bytes belongs to the piece before it."""

# magic, version, codec, key length, parts, payload bytes, stored bytes, namespace, key
_FIXED = struct.Struct(f"<8sHBBIQQ16s{KEY_BYTES_MAX}s")
_SUM = struct.Struct("<Q")
_FIXED_SUM_AT = _FIXED.size
_KEY_AT = _FIXED_SUM_AT - KEY_BYTES_MAX
_PARTS_AT = 128
assert _FIXED_SUM_AT + _SUM.size <= _PARTS_AT
assert _PARTS_AT + PARTS_MAX * _SUM.size <= HEADER_BYTES

Buffer = memoryview


class Header:
    """The decoded fixed part of a record header."""

    __slots__ = ("codec", "key", "namespace", "parts", "payload_bytes", "stored_bytes")

    def __init__(
        self,
        key: BlockKey,
        namespace: bytes,
        payload_bytes: int,
        parts: int = 1,
        codec: int = CODEC_RAW,
        stored_bytes: int | None = None,
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.parts = parts
        self.codec = codec
        self.stored_bytes = payload_bytes if stored_bytes is None else stored_bytes

    def write(self, record: Buffer) -> None:
        """Write the fixed part; the parts' checksums are written by `seal_part`."""
        packed = _packed(self)
        record[: len(packed)] = packed

    @staticmethod
    def read(record: Buffer) -> Header:
        """Decode and check a header; raises FormatError on anything that kvtier did not write."""
        if len(record) < HEADER_BYTES:
            raise FormatError(f"a record header has {HEADER_BYTES} bytes, not {len(record)}")
        fixed = record[: _FIXED.size]
        magic, version, codec, key_len, parts, payload, stored, namespace, key = _FIXED.unpack(
            fixed
        )
        if magic != MAGIC:
            raise FormatError("not a kvtier block record")
        if version != VERSION:
            raise FormatError(f"record version {version}; this kvtier reads version {VERSION}")
        if _SUM.unpack_from(record, _FIXED_SUM_AT)[0] != xxhash.xxh3_64_intdigest(fixed):
            raise FormatError("the record header fails its checksum")
        sane = GROUP_BYTES < key_len <= KEY_BYTES_MAX and 0 < parts <= PARTS_MAX
        if not sane or payload % parts:
            raise FormatError("the record header is inconsistent")
        return Header(BlockKey(key[:key_len]), namespace, payload, parts, codec, stored)


def behind(buffers: Sequence[Buffer], count: int) -> list[Buffer]:
    """What these buffers hold behind their first `count` bytes."""
    for index, view in enumerate(buffers):
        if count < view.nbytes:
            return [view.cast("B")[count:], *buffers[index + 1 :]]
        count -= view.nbytes
    return []


def padded(size: int) -> int:
    """`size` rounded up to what direct I/O can move."""
    return -(-size // ALIGN) * ALIGN


def record_bytes(payload_bytes: int) -> int:
    """The room a record with this payload takes in a slot."""
    return HEADER_BYTES + padded(payload_bytes)


def pieces_of(size: int) -> int:
    """How many pieces a part of this size has: all of them `PIECE_BYTES`, but for the last."""
    return max(1, (size + PIECE_BYTES - TAIL_BYTES) // PIECE_BYTES)


def part_sum(part: Buffer) -> int:
    """The checksum of one part of a payload."""
    if len(part) < PIECE_BYTES + TAIL_BYTES:
        return xxhash.xxh3_64_intdigest(part)
    starts = [index * PIECE_BYTES for index in range(pieces_of(len(part)))]
    ends = [*starts[1:], len(part)]
    pairs = zip(starts, ends, strict=True)
    return sum_of([xxhash.xxh3_64_intdigest(part[start:end]) for start, end in pairs])


class PartSum:
    """The checksum of a part that is looked at in strips, in order: by whoever copies each strip
    while it is in the processor's cache."""

    def __init__(self, size: int) -> None:
        self._ends = [index * PIECE_BYTES for index in range(1, pieces_of(size))] + [size]
        self._at = 0
        self._piece = xxhash.xxh3_64()
        self._pieces: list[int] = []

    def add(self, strip: Buffer) -> None:
        """The next bytes of the part."""
        while len(strip):
            room = self._ends[len(self._pieces)] - self._at
            self._piece.update(strip[:room])
            self._at += min(room, len(strip))
            if len(strip) >= room:
                self._pieces.append(self._piece.intdigest())
                self._piece.reset()
            strip = strip[room:]

    def value(self) -> int:
        """The checksum, now that all of the part was added."""
        return sum_of(self._pieces)


def sum_of(pieces: Sequence[int]) -> int:
    """The checksum of a part whose pieces have these."""
    if len(pieces) == 1:
        return pieces[0]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(pieces)}Q", *pieces))


def seal_part(record: Buffer, index: int, part: Buffer) -> None:
    """Write the checksum of part `index`; `part` is its payload, wherever it lies."""
    put_sum(record, index, part_sum(part))


def sum_at(index: int) -> int:
    """Where in a header the checksum of part `index` stands."""
    return _PARTS_AT + index * _SUM.size


def put_sum(record: Buffer, index: int, checksum: int) -> None:
    """Write the checksum of part `index`, by whoever took it."""
    _SUM.pack_into(record, sum_at(index), checksum)


def stated_sum(record: Buffer, index: int) -> int:
    """The checksum that the header states for part `index`."""
    stated: int = _SUM.unpack_from(record, sum_at(index))[0]
    return stated


def seal(record: Buffer, header: Header) -> None:
    """Write a whole header over a raw payload that already lies in `record`."""
    header.write(record)
    size = header.payload_bytes // header.parts
    for index in range(header.parts):
        start = HEADER_BYTES + index * size
        seal_part(record, index, record[start : start + size])


def check_part(record: Buffer, index: int, part: Buffer) -> bool:
    """Whether `part` has the checksum the header states for it."""
    return stated_sum(record, index) == part_sum(part)


def verify(record: Buffer, key: BlockKey, namespace: bytes) -> Outcome:
    """Header and payload of a raw record, proved in full: the check behind every load."""
    header = header_of(record, key, namespace)
    if header is None or header.payload_bytes > len(record) - HEADER_BYTES:
        return Outcome.CORRUPT
    return verify_payload(record, header, record[HEADER_BYTES:])


def verify_payload(record: Buffer, header: Header, payload: Buffer) -> Outcome:
    """Whether a payload, wherever it lies, has the checksums that the record's header states."""
    size = header.payload_bytes // header.parts
    for index in range(header.parts):
        if not check_part(record, index, payload[index * size : (index + 1) * size]):
            return Outcome.CORRUPT
    return Outcome.OK


def header_of(record: Buffer, key: BlockKey, namespace: bytes) -> Header | None:
    """The header of a raw record, if it proves that the record was stored for this key."""
    try:
        header = Header.read(record)
    except FormatError:
        return None
    mine = header.key == key and header.namespace == namespace and header.codec == CODEC_RAW
    return header if mine else None


def verify_header(
    record: Buffer, key: BlockKey, namespace: bytes, payload_bytes: int, parts: int | None
) -> Outcome:
    """Whose a raw record is, and how long, proved by its header alone: for records whose reader
    proves the payload. There is only one such header, so nothing of it need be decoded but the
    number of its parts, where that may be any (None)."""
    if parts is None:
        if (header := header_of(record, key, namespace)) is None:
            return Outcome.CORRUPT
        parts = header.parts
    expected = _packed(Header(key, namespace, payload_bytes, parts))
    return Outcome.OK if record[: len(expected)] == expected else Outcome.CORRUPT


def expected_headers(
    keys: Sequence[BlockKey], namespace: bytes, payload_bytes: int, parts: int
) -> bytes:
    """What `verify_header` looks for, for each of these keys, one behind the other."""
    begins = {
        size: _packed(Header(BlockKey(bytes(size)), namespace, payload_bytes, parts))[:_KEY_AT]
        for size in {len(key) for key in keys}
    }
    fixed = [begins[len(key)] + key.ljust(KEY_BYTES_MAX, b"\0") for key in keys]
    sums = [_SUM.pack(xxhash.xxh3_64_intdigest(each)) for each in fixed]
    return b"".join(itertools.chain.from_iterable(zip(fixed, sums, strict=True)))


def _packed(header: Header) -> bytes:
    """The fixed part of a header, with its checksum."""
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        header.codec,
        len(header.key),
        header.parts,
        header.payload_bytes,
        header.stored_bytes,
        header.namespace,
        header.key,
    )
    return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))
