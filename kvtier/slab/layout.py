"""The table of a slab: a header page and one 64-byte entry a slot (docs/reference/format.md).

An entry is written in an order that a death between any two steps cannot turn into a lie: first the
state RESERVED with the key, then the data, and the state VALID last.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import FormatError, NewerFormat
from kvtier.record.record import Buffer, record_bytes
from kvtier.types import KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, BlockKey

MAGIC = b"KVTSLAB\n"
VERSION = 1
TABLE_AT = 4096
ENTRY_BYTES = 64
SLOT_BITS = 24
SLOT_MASK = (1 << SLOT_BITS) - 1
"""A block's place in a folder of slabs: `slab id << SLOT_BITS | slot`."""
SLOTS_MAX = 1 << SLOT_BITS
SLOT_BYTES_MAX = record_bytes(PAYLOAD_BYTES_MAX)
"""Whoever reads a slot makes room for as much as the header says."""

FREE = 0
RESERVED = 1
ARRIVED = 2
"""All bytes are there, and the header proves whose they are, but nobody has committed the block."""
VALID = 3
BAD = 4
"""Quarantined: failed verification; kept out of use, its key kept for a person to see."""
FAILED = 5
"""What was to arrive never will; whoever waits for it may go on."""

# state, key length, reserved, generation, stored at (seconds since 1970), 12 bytes for what is
# spare and for statistics (used at, uses), key
_ENTRY = struct.Struct(f"<BBHII12x{KEY_BYTES_MAX}s")
assert _ENTRY.size == ENTRY_BYTES
ENTRY_DTYPE = np.dtype(
    [
        ("state", "u1"),
        ("key_bytes", "u1"),
        ("reserved", "<u2"),
        ("generation", "<u4"),
        ("stored_at", "<u4"),
        ("spare", "V4"),
        ("used_at", "<u4"),
        ("uses", "<u4"),
        ("key", f"V{KEY_BYTES_MAX}"),
    ]
)

USES_AT = 16
"""Where in an entry its statistics stand: eight bytes that are written without the rest, and that
no comparison looks at."""
USES = struct.Struct("<II")
USES_MAX = 0xFFFFFFFF

# magic, version, flags, slots, slot bytes, data offset, slab id, namespace
_HEADER = struct.Struct("<8sHHIQQI16s")
_HEADER_SUM = struct.Struct("<Q")
FLAG_MAPPED = 2
"""Who uses it has mapped its files, which must not be cut."""
FLAG_DISCARD = 1
"""Nobody wants these blocks once the process is gone."""
CHANGES_AT = 120
CHANGES = struct.Struct("<Q")
"""How often an owner that maps its table has written there: that leaves the file's time alone."""
OWNER_AT = 128
OWNER = struct.Struct("<I")
"""Who may write here: outside the header's checksum, because it changes hands."""


class SlabHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry of one slab."""

    slots: int
    slot_bytes: int
    data_at: int
    slab_id: int
    namespace: bytes
    flags: int = 0

    def pack(self) -> bytes:
        """The header page without its owner field."""
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            self.flags,
            self.slots,
            self.slot_bytes,
            self.data_at,
            self.slab_id,
            self.namespace,
        )
        head += _HEADER_SUM.pack(xxhash.xxh3_64_intdigest(head))
        return head.ljust(OWNER_AT, b"\0")

    @staticmethod
    def unpack(page: Buffer | bytes) -> SlabHeader:
        """Decode and check a header page; raises FormatError with what is wrong."""
        size = _HEADER.size
        if len(page) < TABLE_AT:
            raise FormatError("the slab's header page is cut short")
        magic, version, flags, slots, slot_bytes, data_at, slab_id, namespace = _HEADER.unpack(
            page[:size]
        )
        if magic != MAGIC:
            raise FormatError("not a kvtier slab")
        if version != VERSION:
            raise NewerFormat(f"slab version {version}; this kvtier reads version {VERSION}")
        if _HEADER_SUM.unpack_from(page, size)[0] != xxhash.xxh3_64_intdigest(page[:size]):
            raise FormatError("the slab's header fails its checksum")
        if not 0 < slots <= SLOTS_MAX or not 0 < slot_bytes <= SLOT_BYTES_MAX or slot_bytes % 4096:
            raise FormatError("the slab's header is inconsistent")
        return SlabHeader(
            slots=slots,
            slot_bytes=slot_bytes,
            data_at=data_at,
            slab_id=slab_id,
            namespace=namespace,
            flags=flags,
        )

    @property
    def table_bytes(self) -> int:
        """Header page and table together."""
        return entry_at(self.slots)

    def slot_at(self, slot: int) -> int:
        """Where a slot's record begins in the data file."""
        return self.data_at + slot * self.slot_bytes

    @property
    def data_end(self) -> int:
        """Where the last record ends in the data file."""
        return self.slot_at(self.slots)


def changes_in(page: Buffer | bytes) -> int:
    """From a header page, what is another number after each change by an owner that maps it."""
    (count,), (owner,) = CHANGES.unpack_from(page, CHANGES_AT), OWNER.unpack_from(page, OWNER_AT)
    return int(count) << 32 | int(owner)


def entry_at(slot: int) -> int:
    """Where a slot's entry begins in the table file."""
    return TABLE_AT + slot * ENTRY_BYTES


def pack_entries(state: int, keys: Sequence[BlockKey], generation: int, stored_at: int) -> bytes:
    """Entries of the table, one behind the other."""
    pack, turn = _ENTRY.pack, generation & 0xFFFFFFFF
    return b"".join([pack(state, len(key), 0, turn, stored_at, key) for key in keys])


def add_uses(entry: Buffer | bytes, count: int, at: int) -> bytes:
    """The statistics of an entry whose block was used so many times more, at last then."""
    _, uses = USES.unpack_from(entry, USES_AT)
    return USES.pack(at, min(uses + count, USES_MAX))


def possible(uses: int, at: float, now: float) -> tuple[int, int]:
    """Statistics from elsewhere, cut down to what can be: a block that was used in days to come
    would never be the next to go."""
    return max(0, min(uses, USES_MAX)), int(max(0.0, min(at, now)))


def same_block(one: bytes, other: bytes) -> bool:
    """Whether two readings of an entry speak of one and the same block, used meanwhile or not: all
    but the statistics is as it was."""
    behind = USES_AT + USES.size
    return one[:USES_AT] == other[:USES_AT] and one[behind:] == other[behind:]


def are_same_blocks(
    some: npt.NDArray[np.void], others: npt.NDArray[np.void]
) -> npt.NDArray[np.bool_]:
    """Whether readings of entries speak of the same blocks, one by one, whatever their states."""
    one, other = (each.view(np.uint8).reshape(-1, ENTRY_BYTES) for each in (some, others))
    alike = one == other
    alike[:, 0] = alike[:, USES_AT : USES_AT + USES.size] = True
    same: npt.NDArray[np.bool_] = alike.all(axis=1)
    return same


def are_of(entries: npt.NDArray[np.void], keys: Sequence[BlockKey]) -> npt.NDArray[np.bool_]:
    """Whether entries are those of these keys, one by one."""
    padded = np.frombuffer(b"".join([key.ljust(KEY_BYTES_MAX, b"\0") for key in keys]), np.uint8)
    found = np.ascontiguousarray(entries["key"]).view(np.uint8)
    lengths = np.array([len(key) for key in keys])
    same: npt.NDArray[np.bool_] = (found == padded).reshape(len(keys), -1).all(axis=1)
    same &= entries["key_bytes"] == lengths
    return same


def last_used(entries: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """When the block of each entry was used last; one that never was, when it was stored."""
    seconds: npt.NDArray[np.float64] = np.maximum(entries["stored_at"], entries["used_at"]) * 1.0
    return seconds


def ends_first(slots: Sequence[int], last_used: Sequence[float]) -> list[int]:
    """Slots whose times ascend, those of one time turned round: a prompt lies there from its head
    on, and has to go from its end."""
    turned: list[int] = np.asarray(slots)[ends_first_order(np.asarray(last_used))].tolist()
    return turned


def ends_first_order(last_used: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """The positions that `ends_first` takes slots from."""
    begins = np.flatnonzero(np.diff(last_used, prepend=-np.inf))
    ends = np.append(begins, len(last_used))[1:]
    order: npt.NDArray[np.intp] = np.repeat(begins + ends - 1, ends - begins)
    order -= np.arange(len(last_used))
    return order


def key_in(entry: Buffer | bytes | bytearray) -> BlockKey:
    """The key that stands in an entry."""
    return BlockKey(bytes(entry[24 : 24 + min(entry[1], KEY_BYTES_MAX)]))


def read_entries(table: Buffer | bytes, slots: int) -> npt.NDArray[np.void]:
    """The table as a numpy array of entries, without copying."""
    return np.frombuffer(table, ENTRY_DTYPE, slots, TABLE_AT)


def entries_in(text: bytes, slots: int = SLOTS_MAX) -> npt.NDArray[np.void]:
    """The entries of a table as it was read, which may be cut short; at most so many."""
    there = max(0, len(text) - TABLE_AT) // ENTRY_BYTES
    return read_entries(text.ljust(TABLE_AT, b"\0"), min(slots, there))


def committed(entries: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """The slots whose entries say that a block is there."""
    # A length of 0 wraps to 255, so that one comparison rules out both impossible ends.
    lengths_ok = entries["key_bytes"] - np.uint8(1) < KEY_BYTES_MAX
    return np.flatnonzero((entries["state"] == VALID) & lengths_ok)


def keys_of(entries: npt.NDArray[np.void]) -> list[BlockKey]:
    """The keys of many entries at once; entries of impossible length get an empty key."""
    lengths = entries["key_bytes"]
    columns = np.ascontiguousarray(entries["key"]).view(np.uint8).reshape(-1, KEY_BYTES_MAX)
    keys: list[BlockKey] = [BlockKey(b"")] * len(entries)
    for length in np.unique(lengths).tolist():
        if not 0 < length <= KEY_BYTES_MAX:
            continue
        rows = np.flatnonzero(lengths == length)
        cut = np.ascontiguousarray(columns[rows, :length])
        found: list[BlockKey] = cut.view(f"V{length}").ravel().tolist()
        if len(rows) == len(keys):
            return found
        for row, key in zip(rows.tolist(), found, strict=True):
            keys[row] = key
    return keys


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring slots, as (start, stop) positions in the sequence given: one I/O each."""
    cuts = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(slots)], strict=True)) if slots else []


PIECES_MAX = 31
"""A slab has no more, as a mark has a bit for each."""
PIECE_BYTES = 64 << 20
"""Drivers and kernels have refused large ranges."""


def pieces_of(
    slots: int,
    slot_bytes: int,
    first_at: int,
    piece_bytes: int = PIECE_BYTES,
    page_bytes: int = mmap.PAGESIZE,
) -> Iterator[range]:
    """Neighbouring slots, the first of all at such an address. A piece ends where a slot does, so
    that no copy crosses from one into the next, and where a page of the system does, because a
    driver pins whole pages, and refuses one that it has: all that is left, if no slot does so."""
    step, at = max(piece_bytes // slot_bytes, 1), 0
    while at < slots:
        end = at + step
        while end < slots and (first_at + end * slot_bytes) % page_bytes:
            end += 1
        yield range(at, min(end, slots))
        at = end


def piece_slots(slot_bytes: int) -> int:
    """How many slots a piece has, of a slab that begins with a page; the last may have fewer."""
    return len(next(pieces_of(SLOTS_MAX, slot_bytes, 0, PIECE_BYTES)))


def pieces_in(base: int, slots: int, slot_bytes: int) -> list[range]:
    """The pieces of a slab whose slots are numbered from `base` on, which begins with a page."""
    pieces = pieces_of(slots, slot_bytes, 0, PIECE_BYTES)
    return [range(base + piece.start, base + piece.stop) for piece in pieces]


def pinning_order(entries: npt.NDArray[np.void], pieces: Sequence[range]) -> list[range]:
    """These pieces, those first whose blocks were used most, and last. Of all others the first
    ones: new blocks go where this begins."""

    def heat(piece: range) -> tuple[int, float, int]:
        part = entries[piece.start : piece.stop]
        valid = part[committed(part)]
        most = int(valid["uses"].sum(dtype=np.uint64))
        return -most, -float(last_used(valid).max(initial=0.0)), piece.start

    return sorted(pieces, key=heat)
