"""Parsers of what lies on a disk or in a store, and of figures that are kept there."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from campaign.damage.specimens import BLOCKS, NAMESPACE
from campaign.fuzz.harness import JSON_WORDS, Target
from kvtier.backends.nvme.drives import parse as parse_counters
from kvtier.backends.nvme.write_budget import Entry, WriteLedger, pack
from kvtier.backends.object import manifests as manifest
from kvtier.backends.object import object_names
from kvtier.backends.object.lease import CaretakerReport, Term, read_term
from kvtier.backends.object.object_names import manifest_prefix, parse_server, uses_prefix
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.backends.object.use_counts import used_blocks
from kvtier.cost import rates
from kvtier.cost.model import CostModel
from kvtier.cost.rates import Owner, Rates, SavedLink, SavedPrefill
from kvtier.errors import UNREADABLE, FormatError
from kvtier.eviction.retention import RetainedBlocks
from kvtier.record.codec import Codec, decode, encode
from kvtier.record.record import Header, record_bytes, verify
from kvtier.slab import layout, retention_list
from kvtier.testing.subject import blank, make_keys, prove, sealed
from kvtier.types import Namespace

_KEYS = make_keys(BLOCKS)
_DIGEST = NAMESPACE.digest
_WRITER = "0123456789abcdef"


def targets(folder: Path) -> list[Target]:
    """All of them; files lie in this folder."""
    return [
        *(_record(), _table(), _manifest(), _uses(folder), _names()),
        *(_namespace(), _retained(), _term(), *_codecs()),
        *(_budget(folder), _counters(), _rates()),
    ]


def every_other(mend: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Mend every other input."""
    turns = itertools.cycle((True, False))
    return lambda data: mend(data) if next(turns) else data


def resum(data: bytes, size: int) -> bytes:
    """The same with the right checksum behind its first bytes: noise alone would be refused there,
    and never get any further."""
    if len(data) < size + 8:
        return data
    return data[:size] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:size])) + data[size + 8 :]


def _record() -> Target:
    room, mended = blank(NAMESPACE), every_other(lambda data: resum(data, 88))

    def parse(data: bytes) -> None:
        data = mended(data)[: len(room)]
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
    mended = every_other(lambda data: resum(data, 52))

    def parse(data: bytes) -> None:
        data = mended(data)
        found = layout.SlabHeader.unpack(data)
        rows = layout.entries_in(data, found.slots)
        valid = layout.committed(rows)
        keys = layout.keys_of(rows[valid])
        assert all(0 < len(key) <= 40 for key in keys)
        layout.keys_of(rows)
        layout.ends_first(valid.tolist(), np.sort(layout.last_used(rows[valid])).tolist())
        for row in rows[:8]:
            layout.key_in(row.tobytes())
        assert found.data_end >= 0

    return Target(name="slab table", corpus=[page + entries], parse=parse, typed=(FormatError,))


def _retained() -> Target:
    """The list of retained blocks."""
    now, kept = 1_700_000_000.0, {"session": {_KEYS[0]: 1.8e9, _KEYS[1]: 1.9e9}, "": {}}

    def mend(data: bytes) -> bytes:
        """With the right length and checksum."""
        body = data[40:]
        digest = xxhash.xxh3_64_intdigest(body)
        return data[:12] + struct.pack("<IQ", len(body), digest) + _DIGEST + body

    mended = every_other(lambda data: mend(data) if len(data) >= 40 else data)

    def parse(data: bytes) -> None:
        data = mended(data)
        retained = RetainedBlocks(lambda: now)
        retained.allow(8)
        retained.restore(retention_list.decode(data, _DIGEST))
        assert len(retained) <= 8

    corpus = [retention_list.encode(kept, _DIGEST)]
    return Target(name="retained list", corpus=corpus, parse=parse, typed=(FormatError,))


def _term() -> Target:
    """What a caretaker says of a bucket; every other input has the checksum that it should have."""

    def seal(data: bytes) -> bytes:
        with contextlib.suppress(*UNREADABLE):
            return msgspec.json.encode(msgspec.json.decode(data, type=Term).sealed())
        return data

    mended = every_other(seal)
    corpus = [msgspec.json.encode(Term(_WRITER, 45.0, 3, CaretakerReport(seen={_WRITER: 7})))]

    def parse(data: bytes) -> None:
        found = read_term(memoryview(mended(data)))
        assert found is None or found.check == found.sealed().check

    return Target(name="caretaker's report", corpus=corpus, parse=parse, typed=(), words=JSON_WORDS)


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
    mended = every_other(_resummed)

    def parse(data: bytes) -> None:
        entries, _ = manifest.unpack(memoryview(mended(data)), _DIGEST)
        manifest.key_prints(entries)

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
    mended = every_other(_resummed)

    def parse(data: bytes) -> None:
        path.write_bytes(mended(data))
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


_NOW = 1_700_000_000.0
_RATE, _BURST = 1e6, 3.6e9


def _budget(folder: Path) -> Target:
    """As an engine's keeper leases from it, because a file that cannot be read is mended there."""
    root = folder / "budget"
    root.mkdir()
    ledger = WriteLedger(root, _RATE, _BURST, lambda: _NOW)
    mended = every_other(lambda data: resum(data, 56))

    def parse(data: bytes) -> None:
        ledger.path.write_bytes(mended(data))
        granted, told = ledger.exchange(4096.0, 1e8)
        assert 0.0 <= granted <= 1e8
        assert told.level <= _BURST
        left = ledger.look()
        assert left is None or left.level <= _BURST
        granted, told = ledger.exchange(0.0, -4096.0, 1.0)
        assert granted == -4096.0
        assert told.level <= _BURST

    entries = [Entry(_RATE, _BURST, level, _NOW - 9, 1e12, _NOW - 1e6) for level in (1e9, -1e6)]
    numbers = [struct.pack("<d", value) for value in (0.0, -1.0, 1e24, 1e308, 5e-324)]
    words = [*numbers, struct.pack("<d", float("nan")), struct.pack("<d", float("inf"))]
    return Target(
        name="write budget",
        corpus=[pack(entry) for entry in entries],
        parse=parse,
        typed=(),
        words=words,
        share=0.2,
    )


def _counters() -> Target:
    """What nvme-cli answers."""

    def parse(data: bytes) -> None:
        drive = parse_counters("/dev/nvme0n1", data)
        assert bool(drive.problem) == (drive.written is None)
        assert drive.written is None or drive.written >= 0
        assert drive.percent_used is None or 0 <= drive.percent_used <= 255

    corpus = [
        b'{"critical_warning": 0, "percent_used": 3, "data_units_written": 123456}',
        b'{"data_units_written": "18446744073709551615", "percent_used": "255"}',
    ]
    words = [*JSON_WORDS, b'"data_units_written": ', b"percent_used", b"1_0", "٣".encode()]
    return Target(name="drive's counters", corpus=corpus, parse=parse, typed=(), words=words)


def _rates() -> Target:
    """Kept rates, and a cost model that begins with them."""
    owner = Owner("machine", "device", "model", "stack")
    links = {"nvme": SavedLink(0.001, 0.2), "device": SavedLink(0.0, 0.05)}
    prefill = SavedPrefill(0.01, 0.001, 8192)

    def parse(data: bytes) -> None:
        kept = rates.decode(data)
        model = CostModel(clock=lambda: _NOW)
        model.recall(kept.rates)
        model.publish()
        again = rates.decode(rates.encode(owner, model.latest))
        assert again.rates == model.latest

    return Target(
        name="kept rates",
        corpus=[rates.encode(owner, Rates(links, prefill))],
        parse=parse,
        typed=(ValueError,),
        words=JSON_WORDS,
    )
