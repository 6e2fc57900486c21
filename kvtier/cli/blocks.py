"""Single blocks on a stack's media, seen from outside, and whether their records are good."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvtier.cli.holdings import Place, Slab, read_file
from kvtier.config import StackConfig
from kvtier.core.records.record import (
    CODEC_RAW,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Header,
    record_bytes,
    verify,
)
from kvtier.core.slab.layout import (
    BAD,
    ENTRY_BYTES,
    ENTRY_DTYPE,
    VALID,
    committed,
    entry_at,
    keys_of,
    same_block,
)
from kvtier.errors import FormatError
from kvtier.types import BlockKey, Namespace

if TYPE_CHECKING:
    from kvtier.cli.prove_objects import StoreProver


class Proof(enum.Enum):
    """What reading a record has shown."""

    GOOD = "good"
    BAD = "bad"
    GONE = "gone"
    """Its slot was used again, or its object deleted, while it was read."""
    NEWER = "newer"
    """A newer kvtier has written it: it is left alone."""
    UNREAD = "unread"
    """The medium failed."""


class Verdict(NamedTuple):
    """What a block's record is worth, why it is bad if it is, and the raw record if it is good."""

    proof: Proof
    why: str = ""
    record: memoryview | None = None


class Block(msgspec.Struct, kw_only=True):
    """One committed or quarantined block."""

    tier: int
    kind: str
    namespace: str
    key: BlockKey
    bytes: int
    stored_at: float
    hits: int | None = None
    """How often requests used it; None where nobody counts that."""
    used: float | None = None
    """When one did last."""
    quarantined: bool = False
    slot: int = -1
    slab: Slab | None = None
    name: str = ""
    """The object's name, in a store."""

    @property
    def where(self) -> str:
        return self.name if self.slab is None else f"{self.slab.data}:{self.slot}"


def blocks_of(place: Place, namespace: str = "", begins: Sequence[str] = ("",)) -> Iterator[Block]:
    """The blocks of a place, or those of one namespace in it. A store is asked for no others than
    those whose keys begin with one of these digits."""
    if place.kind == "object":
        from kvtier.cli.look_objects import list_blocks

        yield from list_blocks(place, namespace, begins)
    for slab in place.slabs:
        if slab.namespace.startswith(namespace):
            yield from _blocks_of_slab(place, slab)


def _blocks_of_slab(place: Place, slab: Slab) -> Iterator[Block]:
    entries = slab.entries()
    states = entries["state"]
    rows = [*committed(entries).tolist(), *(states == BAD).nonzero()[0].tolist()]
    chosen = entries[rows]
    columns = [chosen[name].tolist() for name in ("stored_at", "uses", "used_at")]
    for slot, key, at, uses, used_at in zip(rows, keys_of(chosen), *columns, strict=True):
        yield Block(
            tier=place.tier,
            kind=place.kind,
            namespace=slab.namespace,
            key=key,
            bytes=slab.header.slot_bytes,
            stored_at=float(at),
            hits=uses,
            used=float(used_at) or None,
            quarantined=bool(states[slot] == BAD),
            slot=slot,
            slab=slab,
        )


class Prover:
    """Reads records and checks them as docs/reference/format.md says."""

    def __init__(self, config: StackConfig, namespaces: Mapping[str, Namespace]) -> None:
        self._config = config
        self._namespaces = namespaces
        self._stores: dict[int, StoreProver] = {}
        self._opening = threading.Lock()

    def prove(self, block: Block) -> Verdict:
        """Read a block's record; what it is worth."""
        if block.slab is not None:
            return _prove_slot(block, block.slab)
        with self._opening:  # several threads prove at once
            if block.tier not in self._stores:
                from kvtier.cli.prove_objects import StoreProver

                self._stores[block.tier] = StoreProver(self._config.tiers[block.tier])
        return self._stores[block.tier].prove(block, self._namespaces.get(block.namespace))

    def bytes_of(self, block: Block) -> int:
        """The memory that a block's proof takes, its record included. What an object says itself
        does not count: it is unpacked only if it has the size that its namespace says."""
        namespace = self._namespaces.get(block.namespace)
        if block.slab is not None or namespace is None:
            return 2 * block.bytes  # what is read in pieces is there twice when they are joined
        return block.bytes + 2 * record_bytes(namespace.payload_of(block.key))

    def close(self) -> None:
        """Release connections."""
        for store in self._stores.values():
            store.close()


def _prove_slot(block: Block, slab: Slab) -> Verdict:
    try:
        before = _entry(slab, block.slot)
        if before[0] != VALID:
            return Verdict(Proof.GONE, "its slot has changed")
        size = slab.header.slot_bytes
        text = read_file(slab.data, size, slab.header.slot_at(block.slot))
        after = _entry(slab, block.slot)
    except FileNotFoundError:
        return Verdict(Proof.GONE, "its slab was removed")
    except OSError as error:
        return Verdict(Proof.UNREAD, str(error.strerror))
    if not same_block(before, after):
        return Verdict(Proof.GONE, "its slot was used again meanwhile")
    if len(text) < size:
        return Verdict(Proof.BAD, "the file is cut short")
    return judge(memoryview(text), block)


def judge(record: memoryview, block: Block) -> Verdict:
    """What a raw record is worth."""
    if verify(record, block.key, bytes.fromhex(block.namespace)).ok:
        return Verdict(Proof.GOOD, "", record)
    if is_newer(record):
        return Verdict(Proof.NEWER, "written by a newer kvtier")
    return Verdict(Proof.BAD, why_bad(record, block))


def is_newer(record: memoryview) -> bool:
    """Whether a newer kvtier has written this record, which is then to be left alone."""
    if bytes(record[: len(MAGIC)]) != MAGIC:
        return False
    return int.from_bytes(record[len(MAGIC) : len(MAGIC) + 2], "little") > VERSION


def why_bad(record: memoryview, block: Block) -> str:
    """What is wrong with a record that fails, in words."""
    try:
        header = Header.read(record)
    except FormatError as error:
        return str(error)
    if header.key != block.key:
        return f"the record belongs to the key {header.key.hex()}"
    if header.namespace.hex() != block.namespace:
        return f"the record belongs to the namespace {header.namespace.hex()}"
    if header.payload_bytes > len(record) - HEADER_BYTES:
        return f"a payload of {header.payload_bytes} bytes does not fit its slot"
    if header.codec != CODEC_RAW and block.slab is not None:
        return f"codec {header.codec}, where only raw records may be"
    return "the payload fails its checksum"


def entry_of(slab: Slab, slot: int) -> tuple[int, BlockKey]:
    """State and key of a slot, as its entry is now; raises OSError if the table is gone."""
    entry = _entry(slab, slot)
    (key,) = keys_of(np.frombuffer(entry, ENTRY_DTYPE))
    return entry[0], key


def _entry(slab: Slab, slot: int) -> bytes:
    text = read_file(slab.table, ENTRY_BYTES, entry_at(slot))
    return text.ljust(ENTRY_BYTES, b"\0")
