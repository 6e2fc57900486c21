"""The format of a manifest: a list of entries about blocks that were added or removed.

A manifest is one immutable object. Every server appends by writing new manifests under names of its
own, so no server can overwrite another's. The state of a namespace is the union of all manifests:
of all entries about one object the latest counts, in whatever order they are read. The caretaker
joins manifests into one that lists those it covers.

    8s magic, u16 version, u16 0, u32 bytes of the cover list, u64 entries, 16s namespace,
    u64 xxh3 of the entries, u64 xxh3 of all before it and the cover list
    cover list: names, one a line
    entries of 64 bytes: u8 key length, u8 kind, u16 generation, u32 last use in seconds since the
    epoch (0: not known), u64 size, u64 microseconds since the epoch, 40s key
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.backends.object.object_names import ObjectKey
from kvtier.backends.object.stores.store import OBJECT_BYTES_MAX
from kvtier.errors import FormatError, NewerFormat
from kvtier.record.record import Buffer
from kvtier.slab.layout import keys_of
from kvtier.types import GROUP_BYTES, KEY_BYTES_MAX, BlockKey

MAGIC = b"KVTMAN\r\n"
VERSION = 1
ADDED = 1
REMOVED = 2
USED = 3
"""Stands in lists of uses only, which have the same format (see `use_counts`)."""
RETAINED = 4
"""Stands in lists of retained blocks only; the time is the end of the retention."""

ENTRY = np.dtype(
    [
        ("key_bytes", "u1"),
        ("kind", "u1"),
        ("generation", "<u2"),
        ("used_s", "<u4"),
        ("size", "<u8"),
        ("time_us", "<u8"),
        ("key", f"V{KEY_BYTES_MAX}"),
    ]
)
Entries = npt.NDArray[np.void]
Prints = npt.NDArray[np.uint64]

_HEAD = struct.Struct("<8sHHIQ16sQ")
_SUM = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size
COVERS_BYTES_MAX = 1 << 20
_TIME_MAX_US = 1 << 53
"""The year 2255. Later times would not be exact in seconds, and a correction is always later."""
SKEW_US = 3_600_000_000
"""The clocks of servers differ by no more than this; a later time comes from a wrong clock."""
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
"""For each length of a key, which bits of its words must be zero."""


def pack_entries(
    kind: int,
    keys: Sequence[BlockKey],
    generations: Sequence[int] | int,
    sizes: Sequence[int] | int,
    times_us: Sequence[int] | int,
) -> Entries:
    """Entries of one kind. A column may be one number for all."""
    entries = np.zeros(len(keys), ENTRY)
    entries["kind"] = kind
    entries["key_bytes"] = [len(key) for key in keys]
    entries["generation"] = generations
    entries["size"] = sizes
    entries["time_us"] = np.minimum(times_us, _TIME_MAX_US)
    padded = b"".join([key.ljust(KEY_BYTES_MAX, b"\0") for key in keys])
    entries["key"] = np.frombuffer(padded, entries["key"].dtype)
    return entries


def objects_of(objects: Sequence[ObjectKey]) -> Entries:
    """Entries without a kind about these objects, to look for others about the same ones."""
    return pack_entries(0, [key for key, _ in objects], [number for _, number in objects], 0, 0)


def removals(objects: Sequence[ObjectKey], at_us: int) -> Entries:
    """Entries that say that these objects are gone since then."""
    entries = objects_of(objects)
    entries["kind"], entries["time_us"] = REMOVED, min(at_us, _TIME_MAX_US)
    return entries


def objects_in(entries: Entries) -> list[ObjectKey]:
    """What these entries are about."""
    return list(zip(keys_of(entries), entries["generation"].tolist(), strict=True))


def same_objects(some: Entries, others: Entries) -> npt.NDArray[np.bool_]:
    """Row by row, whether two entries are about the same object."""
    same: npt.NDArray[np.bool_] = some["key"] == others["key"]
    same &= some["key_bytes"] == others["key_bytes"]
    same &= some["generation"] == others["generation"]
    return same


def pack(namespace: bytes, entries: Entries, covers: Iterable[str] = ()) -> list[Buffer]:
    """A manifest, as buffers to be written one after the other."""
    names = "\n".join(covers).encode()
    body = np.ascontiguousarray(entries).view(np.uint8).data
    head = _HEAD.pack(
        MAGIC, VERSION, 0, len(names), len(entries), namespace, xxhash.xxh3_64_intdigest(body)
    )
    head_sum = _SUM.pack(xxhash.xxh3_64_intdigest(head + names))
    return [memoryview(head + head_sum + names), body]


def unpack_head(data: Buffer, namespace: bytes) -> tuple[int, int, list[str]]:
    """Bytes before the entries, number of entries, and cover list. `data` may end there."""
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


def object_prints(entries: Entries) -> Prints:
    """64 bits for each key and generation, mixed from all their bits."""
    return _fingerprints(entries, entries["generation"])


def key_prints(entries: Entries) -> Prints:
    """The same whatever the generation is."""
    return _fingerprints(entries, 0)


def _fingerprints(entries: Entries, generations: npt.NDArray[np.uint16] | int) -> Prints:
    prints = entries["key_bytes"].astype(np.uint64) * np.uint64(0xA0761D6478BD642F)
    prints += np.uint64(0xD6E8FEB86659FD93) * np.asarray(generations, np.uint64)
    for column, odd in zip(_key_words(entries), _ODD, strict=True):
        prints ^= column
        prints *= np.uint64(odd)
        prints ^= prints >> np.uint64(29)
    return prints


def _key_words(entries: Entries) -> npt.NDArray[np.uint64]:
    """The bytes of the keys, padded with zeros, as columns of 64-bit words."""
    words = np.ascontiguousarray(entries).view("<u8").reshape(-1, ENTRY.itemsize // 8)
    return words.T[-KEY_BYTES_MAX // 8 :]


_OPAQUE = np.dtype(f"V{ENTRY.itemsize}")
"""Whole entries without fields, which numpy moves several times as fast."""


def joined(pieces: Iterable[Entries]) -> Entries:
    """All entries of all pieces."""
    whole = np.concatenate([np.zeros(0, _OPAQUE), *(piece.view(_OPAQUE) for piece in pieces)])
    return whole.view(ENTRY)


def merge(pieces: Iterable[Entries]) -> Entries:
    """The latest entry of every object, oldest first. Of two with the same time the removal counts,
    because it is the safer one."""
    entries = joined(pieces)
    # 64 bits stand for key and generation: a collision, once in 10^7 states of a million
    # objects, would forget one block
    prints = object_prints(entries)
    in_order = np.sort(prints)
    latest = np.arange(len(entries))
    if (in_order[1:] == in_order[:-1]).any():  # which is slow, and rare where much is read
        order = np.lexsort((entries["kind"], entries["time_us"], prints))
        latest = order[np.append(in_order[1:] != in_order[:-1], True)]
    latest = latest[np.argsort(entries["time_us"][latest], kind="stable")]
    merged: Entries = entries.view(_OPAQUE)[latest].view(ENTRY)
    return merged
