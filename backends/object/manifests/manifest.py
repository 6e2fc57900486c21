"""Manifests: what writers have added and removed, so that nobody has to ask for single keys.

A manifest is one immutable object with a list of entries. Any number of writers append by writing
new ones under names of their own, so nobody can overwrite another's. The state of a namespace is
the union of all manifests: of the entries of one object the latest counts, whatever the order in
which they are read. Several manifests may be joined into a new one that names those it covers.

    8s magic, u16 version, u16 0, u32 bytes of the cover list, u64 entries, 16s namespace,
    u64 xxh3 of the entries, u64 xxh3 of all before it and the cover list
    cover list: names, one a line
    entries of 64 bytes: u8 key length, u8 kind, u16 generation, u32 0, u64 size, u64 microseconds
    since the epoch, 40s key
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.backends.object.stores.store import OBJECT_BYTES_MAX
from kvtier.core.records.record import Buffer
from kvtier.errors import FormatError, NewerFormat
from kvtier.types import GROUP_BYTES, KEY_BYTES_MAX, BlockKey

MAGIC = b"KVTMAN\r\n"
VERSION = 1
ADDED = 1
REMOVED = 2
USED = 3
"""Not in manifests, but in the lists of uses, which have the same form."""

ENTRY = np.dtype(
    [
        ("key_bytes", "u1"),
        ("kind", "u1"),
        ("generation", "<u2"),
        ("zero", "<u4"),
        ("size", "<u8"),
        ("time_us", "<u8"),
        ("key", f"V{KEY_BYTES_MAX}"),
    ]
)
Entries = npt.NDArray[np.void]
_WHOLE = np.dtype(f"V{ENTRY.itemsize}")
"""Entries without a look into them, which numpy moves several times as fast."""

_HEAD = struct.Struct("<8sHHIQ16sQ")
_SUM = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size
COVERS_BYTES_MAX = 1 << 20
_TIME_MAX_US = 1 << 53
"""The year 2255. What corrects an entry is later, and times beyond it are not exact in seconds."""
SKEW_US = 3_600_000_000
"""Clocks of servers differ by no more; later times come from one that is wrong."""
_ROWS_AT_ONCE = 1 << 16
_ODD = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x27D4EB2F165667C5,
    0x85EBCA77C2B2AE63,
)

_BEHIND_KEY = (
    np.array(
        [[0] * size + [0xFF] * (KEY_BYTES_MAX - size) for size in range(KEY_BYTES_MAX + 1)],
        np.uint8,
    )
    .view("<u8")
    .T
)
"""Which bits of a key's words are zero, by its length."""


def pack_entries(
    kind: int,
    keys: Sequence[BlockKey],
    generations: Sequence[int] | int,
    sizes: Sequence[int] | int,
    times_us: Sequence[int] | int,
) -> Entries:
    """Entries of one kind, from columns, or from one number for all."""
    entries = np.zeros(len(keys), ENTRY)
    entries["kind"] = kind
    entries["key_bytes"] = [len(key) for key in keys]
    entries["generation"] = generations
    entries["size"] = sizes
    entries["time_us"] = np.minimum(times_us, _TIME_MAX_US)
    padded = b"".join([key.ljust(KEY_BYTES_MAX, b"\0") for key in keys])
    entries["key"] = np.frombuffer(padded, entries["key"].dtype)
    return entries


def objects_of(keys: Sequence[BlockKey], generations: Sequence[int]) -> Entries:
    """Entries that say nothing about these objects: to look for others about them."""
    return pack_entries(0, keys, generations, 0, 0)


def same_objects(some: Entries, others: Entries) -> npt.NDArray[np.bool_]:
    """Row by row, whether two entries are about the same object."""
    same: npt.NDArray[np.bool_] = some["key"] == others["key"]
    same &= some["key_bytes"] == others["key_bytes"]
    same &= some["generation"] == others["generation"]
    return same


def pack(namespace: bytes, entries: Entries, covers: Iterable[str] = ()) -> list[Buffer]:
    """A manifest, in pieces to be written one after the other."""
    names = "\n".join(covers).encode()
    body = np.ascontiguousarray(entries).view(np.uint8).data
    head = _HEAD.pack(
        MAGIC, VERSION, 0, len(names), len(entries), namespace, xxhash.xxh3_64_intdigest(body)
    )
    head_sum = _SUM.pack(xxhash.xxh3_64_intdigest(head + names))
    return [memoryview(head + head_sum + names), body]


def unpack_head(data: Buffer, namespace: bytes) -> tuple[int, int, list[str]]:
    """Bytes before the entries, number of entries and cover list; `data` may end behind them."""
    if len(data) < HEAD_BYTES:
        raise FormatError("a manifest is too short")
    magic, version, _, names_bytes, count, owner, _ = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise FormatError("not a manifest")
    if version != VERSION:
        raise NewerFormat(f"manifest version {version}; this kvtier reads version {VERSION}")
    end = HEAD_BYTES + names_bytes
    if names_bytes > COVERS_BYTES_MAX or len(data) < end:
        raise FormatError("the cover list of a manifest is too long")
    names = bytes(data[HEAD_BYTES:end])
    (stated,) = _SUM.unpack_from(data, _HEAD.size)
    if stated != xxhash.xxh3_64_intdigest(bytes(data[: _HEAD.size]) + names):
        raise FormatError("the head of a manifest fails its checksum")
    if owner != namespace:
        raise FormatError("a manifest of another namespace")
    return end, count, names.decode("ascii", "replace").split("\n") if names else []


def unpack(
    data: Buffer, namespace: bytes, kinds: Sequence[int] = (ADDED, REMOVED)
) -> tuple[Entries, list[str]]:
    """Entries and cover list; raises FormatError on anything that kvtier did not write."""
    start, count, covers = unpack_head(data, namespace)
    if len(data) != start + count * ENTRY.itemsize:
        raise FormatError("a manifest does not have the length it must have")
    if _HEAD.unpack_from(data)[6] != xxhash.xxh3_64_intdigest(data[start:]):
        raise FormatError("the entries of a manifest fail their checksum")
    entries = np.frombuffer(data, ENTRY, count, start)
    lengths = entries["key_bytes"]
    sane = (
        np.isin(entries["kind"], kinds)
        & (lengths > GROUP_BYTES)
        & (lengths <= KEY_BYTES_MAX)
        & (entries["size"] <= OBJECT_BYTES_MAX)
        & (entries["time_us"] <= _TIME_MAX_US)
    )
    for column, behind in zip(_key_words(entries), _BEHIND_KEY, strict=True):
        sane &= column & behind[np.minimum(lengths, KEY_BYTES_MAX)] == 0
    if not sane.all():
        raise FormatError("an entry of a manifest is inconsistent")
    return entries, covers


def merge(pieces: list[Entries]) -> Entries:
    """The latest entry of every object, oldest first. The pieces, which may be gigabytes, are taken
    out of their list, and only what is out of order is held twice."""
    entries = _in_one(pieces)
    # 64 bits stand for key and generation: a collision, once in 10^7 states of a million
    # objects, would forget one block
    mark = marks(entries, entries["generation"])
    if not _unique(mark):
        latest = np.zeros(len(entries), np.bool_)
        latest[_latest(mark, entries)] = True
        entries = _only(entries, latest)
    del mark
    order = np.argsort(entries["time_us"], kind="stable")
    misplaced = order != np.arange(len(order))
    if misplaced.any():
        first = int(misplaced.argmax())
        moved = entries.view(_WHOLE)
        moved[first:] = moved[order[first:]]
    return entries


def _in_one(pieces: list[Entries]) -> Entries:
    """All entries, those of the oldest piece first. Each piece is let go of when it is copied."""
    pieces.sort(key=lambda piece: int(piece["time_us"][0]) if len(piece) else 0, reverse=True)
    whole = np.empty(sum(map(len, pieces)), _WHOLE)
    end = 0
    while pieces:
        piece = np.ascontiguousarray(pieces.pop()).view(_WHOLE)
        whole[end : end + len(piece)] = piece
        end += len(piece)
    return whole.view(ENTRY)


def _only(entries: Entries, chosen: npt.NDArray[np.bool_]) -> Entries:
    """The chosen entries, moved to the front: for a few others all need not be copied."""
    whole = entries.view(_WHOLE)
    end = 0
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        kept = whole[some][chosen[some]]
        whole[end : end + len(kept)] = kept
        end += len(kept)
    return entries[:end] if 2 * end > len(entries) else entries[:end].copy()


def marks(
    entries: Entries, generations: npt.NDArray[np.uint16] | int = 0
) -> npt.NDArray[np.uint64]:
    """64 bits for each key and generation."""
    mark = entries["key_bytes"].astype(np.uint64) * np.uint64(0xA0761D6478BD642F)
    mark += np.uint64(0xD6E8FEB86659FD93) * np.asarray(generations, np.uint64)
    for column, odd in zip(_key_words(entries), _ODD, strict=True):
        mark ^= column
        mark *= np.uint64(odd)
        mark ^= mark >> np.uint64(29)
    return mark


def _key_words(entries: Entries) -> npt.NDArray[np.uint64]:
    """The keys' bytes, with the zeros behind them, in columns of eight."""
    words = np.ascontiguousarray(entries).view("<u8").reshape(-1, ENTRY.itemsize // 8)
    return words.T[-KEY_BYTES_MAX // 8 :]


def _unique(mark: npt.NDArray[np.uint64]) -> bool:
    in_order = np.sort(mark)
    return bool((in_order[1:] != in_order[:-1]).all())


def _latest(mark: npt.NDArray[np.uint64], entries: Entries) -> npt.NDArray[np.intp]:
    """Rows of the latest entry of each mark; of equal times a removal counts, as the safer one."""
    order = np.lexsort((entries["kind"], entries["time_us"], mark))
    mark = mark[order]
    latest: npt.NDArray[np.intp] = order[np.append(mark[1:] != mark[:-1], True)]
    return latest
