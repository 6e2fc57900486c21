"""Parsers of what lies on a disk or in a store."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from campaign.damage.specimens import BLOCKS, NAMESPACE, PackSpecimen
from campaign.fuzz.targets import Target
from kvtier.backends.object import manifests as manifest
from kvtier.backends.object import object_names
from kvtier.backends.object.object_names import manifest_prefix, parse_server, uses_prefix
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.use_counts import used_blocks
from kvtier.cli.copying.pack_files import PackReader
from kvtier.core.retained import kept_file
from kvtier.core.retained.retained_blocks import RetainedBlocks
from kvtier.core.slab import layout
from kvtier.errors import FormatError
from kvtier.record.codec import Codec, decode, encode
from kvtier.record.record import Header, record_bytes, verify
from kvtier.testing.subject import blank, make_keys, prove, sealed
from kvtier.types import Namespace

_KEYS = make_keys(BLOCKS)
_DIGEST = NAMESPACE.digest
_WRITER = "0123456789abcdef"


def targets(folder: Path) -> list[Target]:
    """All of them; files lie in this folder."""
    return [
        *(_record(), _table(), _manifest(), _uses(folder), _names()),
        *(_pack(folder), _namespace(), _retained(), *_codecs()),
    ]


def resum(data: bytes, size: int) -> bytes:
    """The same with the right checksum behind its first bytes: noise alone would be refused there,
    and never get any further."""
    if len(data) < size + 8:
        return data
    return data[:size] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:size])) + data[size + 8 :]


def _record() -> Target:
    room = blank(NAMESPACE)
    turn = iter(range(1 << 62))

    def parse(data: bytes) -> None:
        if next(turn) % 2:
            data = resum(data, 88)
        data = data[: len(room)]
        room[: len(data)] = data
        record = room[: max(len(data), 4096)]
        if verify(record, _KEYS[0], _DIGEST).ok:
            prove(record, _KEYS[0], NAMESPACE)
        Header.read(record)

    return Target(
        name="record",
        corpus=[bytes(sealed(key, NAMESPACE)) for key in make_keys(2)],
        parse=parse,
        typed=(FormatError,),
    )


def _table() -> Target:
    header = layout.SlabHeader(
        slots=8,
        slot_bytes=record_bytes(NAMESPACE.payload_bytes),
        data_at=0,
        slab_id=7,
        namespace=_DIGEST,
    )
    page = header.pack().ljust(layout.TABLE_AT, b"\0")
    entries = layout.pack_entries(layout.VALID, _KEYS[:8], 3, 1_700_000_000)
    turn = iter(range(1 << 62))

    def parse(data: bytes) -> None:
        if next(turn) % 2:
            data = resum(data, 52)
        found = layout.SlabHeader.unpack(data)
        slots = min(found.slots, max(0, (len(data) - layout.TABLE_AT) // layout.ENTRY_BYTES))
        rows = layout.read_entries(data, slots)
        valid = layout.committed(rows)
        keys = layout.keys_of(rows[valid])
        assert all(0 < len(key) <= 40 for key in keys)
        layout.keys_of(rows)
        layout.ends_first(valid.tolist(), np.sort(layout.last_used(rows[valid])).tolist())
        for slot in range(min(slots, 8)):
            layout.entry_key(memoryview(data), slot)
        assert found.data_end >= 0

    return Target(name="slab table", corpus=[page + entries], parse=parse, typed=(FormatError,))


def _retained() -> Target:
    """The list of retained blocks."""
    turn = iter(range(1 << 62))
    now, kept = 1_700_000_000.0, {"session": {_KEYS[0]: 1.8e9, _KEYS[1]: 1.9e9}, "": {}}

    def parse(data: bytes) -> None:
        if next(turn) % 2 and len(data) >= 40:  # with the right length and checksum
            body = data[40:]
            digest = xxhash.xxh3_64_intdigest(body)
            data = data[:12] + struct.pack("<IQ", len(body), digest) + _DIGEST + body
        retained = RetainedBlocks(lambda: now)
        retained.allow(8)
        retained.restore(kept_file.decode(data, _DIGEST))
        assert len(retained) <= 8

    corpus = [kept_file.encode(kept, _DIGEST)]
    return Target(name="retained list", corpus=corpus, parse=parse, typed=(FormatError,))


def _packed(kind: int, covers: list[str]) -> bytes:
    entries = manifest.pack_entries(kind, _KEYS, 0, 12288, 1_700_000_000_000_000)
    return b"".join(manifest.pack(_DIGEST, entries, covers))


def _resummed(data: bytes) -> bytes:
    """A manifest with the right checksums."""
    start = manifest.HEAD_BYTES
    if len(data) < start:
        return data
    names = int.from_bytes(data[12:16], "little")
    body = xxhash.xxh3_64_intdigest(data[start + names :])
    head = data[:40] + struct.pack("<Q", body)
    total = xxhash.xxh3_64_intdigest(head + data[start : start + names])
    return head + struct.pack("<Q", total) + data[start:]


def _manifest() -> Target:
    turn = iter(range(1 << 62))

    def parse(data: bytes) -> None:
        if next(turn) % 2:
            data = _resummed(data)
        entries, _ = manifest.unpack(memoryview(data), _DIGEST)
        manifest.fingerprints(entries)

    covers = [f"{_WRITER}-{number:010d}" for number in range(3)]
    corpus = [_packed(manifest.ADDED, []), _packed(manifest.REMOVED, covers)]
    return Target(name="manifest", corpus=corpus, parse=parse, typed=(FormatError,))


def _uses(folder: Path) -> Target:
    """Through a store, because the lists of several servers are added up."""
    store = FileStore(folder / "uses")
    path = folder / "uses" / uses_prefix(NAMESPACE.id) / f"{_WRITER}-0000000001"
    path.parent.mkdir(parents=True)
    whole, other = _packed(manifest.USED, []), f"{_WRITER}-0000000002"
    path.with_name(other).write_bytes(whole)
    turn = iter(range(1 << 62))

    def parse(data: bytes) -> None:
        path.write_bytes(_resummed(data) if next(turn) % 2 else data)
        found = used_blocks(store, NAMESPACE.id)
        assert found is not None
        # One that says that it includes the other one stands for it.
        assert len(found) >= BLOCKS or other.encode() in data

    corpus = [whole, _packed(manifest.USED, [other])]
    return Target(name="list of uses", corpus=corpus, parse=parse, typed=(), share=0.1)


def _names() -> Target:
    names = [
        object_names.block_name(NAMESPACE.id, _KEYS[0], 3),
        f"{manifest_prefix(NAMESPACE.id)}{_WRITER}-0000000001",
        f"{uses_prefix(NAMESPACE.id)}{_WRITER}-0000000001",
        object_names.description_name(NAMESPACE.id),
        f"servers/{NAMESPACE.id}-{_WRITER * 2}-{_WRITER}-98304-12288",
    ]

    def parse(data: bytes) -> None:
        name = data.decode("utf-8", "surrogateescape")
        found = object_names.parse_block(name)
        if found is not None:
            assert object_names.block_name(*found) == name
        object_names.parse_manifest(name)
        object_names.parse_uses(name)
        object_names.described_namespace(name)
        server = parse_server(name)
        assert server is None or str(server) == name or server.capacity >= 0

    corpus = [name.encode() for name in names]
    words = [b"/blocks/", b"servers/", b"../", b"-0", b"/manifest/"]
    return Target(name="names", corpus=corpus, parse=parse, typed=(), words=words)


def _pack(folder: Path) -> Target:
    from support.tiers import subjects

    specimen = PackSpecimen("pack", subjects.MEMORY, folder / "packs")
    (whole,) = specimen.files.values()
    (older,) = specimen.older.values()
    path = folder / "fuzzed.kvt"
    # So short that an input has room for a head, two records and an end.
    head = whole.index(b"KVTBLK\r\n")
    end = whole.rindex(b"KVTPEND\n")
    small = older[:head] + older[head : head + 12288] + whole[end:]
    turn = iter(range(1 << 62))

    def parse(data: bytes) -> None:
        text = int.from_bytes(data[12:16], "little")
        path.write_bytes(resum(data, 16 + text) if next(turn) % 2 and text < 8192 else data)
        reader = PackReader(path)
        try:
            found = list(reader.found())
            if reader.namespace == NAMESPACE:
                records = [blank(NAMESPACE) for _ in found[:8]]
                keys = [key for key, _ in found[:8]]
                outcomes = reader.read([at for _, at in found[:8]], keys, records)
                for key, record, outcome in zip(keys, records, outcomes, strict=True):
                    if outcome.ok:
                        prove(record, key, NAMESPACE)
        finally:
            reader.close()

    words = [b"KVTPEND\n", b"KVTPUSE\n", b"KVTBLK\r\n", b"KVTPACK\n"]
    return Target(
        name="pack",
        corpus=[small, whole[: head + 4096] + whole[end:]],
        parse=parse,
        typed=(FormatError,),
        words=words,
        share=0.1,
    )


def _namespace() -> Target:
    def parse(data: bytes) -> None:
        found = Namespace.from_json(data)
        assert found.payload_bytes > 0
        with contextlib.suppress(UnicodeEncodeError):
            assert Namespace.from_json(found.to_json()) == found

    words = [b'"facts"', b'"group_bytes"', b'"parts"', b"{", b"[", b"]", b"1e400", b'"\\ud800"']
    corpus = [NAMESPACE.to_json(), b'{"facts":{},"group_bytes":[1],"parts":1}']
    typed = (msgspec.ValidationError,)
    return Target(name="namespace.json", corpus=corpus, parse=parse, typed=typed, words=words)


def _codecs() -> list[Target]:
    raw = (b"kvtier" * 800)[:4608]
    into = memoryview(bytearray(len(raw)))

    def parsing(codec: Codec) -> Callable[[bytes], None]:
        return lambda data: decode(codec, memoryview(data), into)

    found = []
    for codec in (Codec.ZSTD, Codec.SPLIT_ZSTD):
        _, pieces = encode(codec, memoryview(raw))
        corpus = [b"".join(map(bytes, pieces))]
        name = f"codec {codec.name.lower().replace('_', '-')}"
        found.append(Target(name=name, corpus=corpus, parse=parsing(codec), typed=(FormatError,)))
    return found
