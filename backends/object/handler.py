"""Moves records between host memory and objects: one object a block, compressed or not.

The names of objects follow from key and generation, which is all that a spec tells of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, ParamSpec, Self

from kvtier.backends.object.budget import clock
from kvtier.backends.object.object_names import block_name
from kvtier.backends.object.stores.errors import LengthMismatch, StoreError, StoreFull, TimedOut
from kvtier.backends.object.stores.store import Store
from kvtier.errors import FormatError
from kvtier.interfaces.handler import Handler, own_spec
from kvtier.record.codec import Codec, decode, encode
from kvtier.record.record import HEADER_BYTES, Buffer, Header
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, Outcome

_P = ParamSpec("_P")


class ObjectSpec(LoadStoreSpec, tag="object"):
    """The generation of each block, and which objects are deleted before it is written."""

    medium: ClassVar[str] = "object"
    generations: list[int]
    delete_first: list[list[str]] = []
    """For stores: for each block, names of evicted objects that are deleted before it is written,
    so that the budget holds."""
    until: float = math.inf
    """For stores: when (by `budget.clock`) the room that they were given is another's."""

    def __len__(self) -> int:
        return len(self.generations)

    def select(self, start: int, stop: int) -> Self:
        return type(self)(self.generations[start:stop], self.delete_first[start:stop], self.until)

    @classmethod
    def join(cls, pieces: Sequence[Self]) -> Self:
        return cls(
            [generation for piece in pieces for generation in piece.generations],
            [names for piece in pieces for names in piece.delete_first],
            min((piece.until for piece in pieces), default=math.inf),
        )


class ObjectHandler(Handler):
    """An object is the record's header and its payload, without the padding of a slot.

    A raw object is read straight into the record and written straight from it. A compressed one is
    read into the record, too, and decompressed from a copy of its few bytes.
    """

    batch_blocks = 2

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        codec: Codec,
        *,
        threads: int,
        load_s: float,
        store_s: float,
    ) -> None:
        self.concurrency = threads
        self._store = store
        self._namespace = namespace
        self._codec = codec
        self._load_s = self.call_seconds = load_s
        self._store_s = self.store_seconds = store_s

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        deadline = time.monotonic() + self._load_s
        generations = own_spec(spec, ObjectSpec).generations
        return [
            _outcome(self._load, key, generation, record, deadline)
            for key, generation, record in zip(keys, generations, into, strict=True)
        ]

    def _load(self, key: BlockKey, generation: int, record: Buffer, deadline: float) -> Outcome:
        size = HEADER_BYTES + self._namespace.payload_of(key)
        name = block_name(self._namespace.id, key, generation)
        length = self._store.get(name, record[:size], deadline=deadline)
        if length is None:
            return Outcome.GONE
        header = Header.read(record[:length])
        if header.codec == Codec.RAW:
            return Outcome.OK if length == size else Outcome.CORRUPT
        decompress(memoryview(bytes(record[:length])), header, record[:size])
        return Outcome.OK

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        own = own_spec(spec, ObjectSpec)
        deadline = time.monotonic() + min(self._store_s, max(0.0, own.until - clock()))
        victims = [name for names in own.delete_first for name in names]
        if victims:
            made_room = _outcome(self._delete, victims, own.until, deadline)
            if not made_room.ok:
                return [made_room] * len(keys)
        return [
            _outcome(self._put, key, generation, record, own.until, deadline)
            for key, generation, record in zip(keys, own.generations, records, strict=True)
        ]

    def _delete(self, names: Sequence[str], until: float, deadline: float) -> Outcome:
        _check_lease(until)
        failed = self._store.delete(names, deadline=deadline)
        return Outcome.IO_ERROR if failed else Outcome.OK

    def _put(
        self, key: BlockKey, generation: int, record: Buffer, until: float, deadline: float
    ) -> Outcome:
        name = block_name(self._namespace.id, key, generation)
        size = HEADER_BYTES + self._namespace.payload_of(key)
        pieces = _compressed(record[:size], self._codec)
        _check_lease(until)
        self._store.put(name, pieces, if_absent=True, deadline=deadline)
        return Outcome.OK  # also if another writer was first: it has put the same bytes there

    def close(self) -> None:
        self._store.close()


def _check_lease(until: float) -> None:
    """Raises TimedOut if the lease is over. A deadline would not show it: its clock stands still
    while the machine sleeps, and another writer may have the room by now."""
    if clock() >= until:
        raise TimedOut("the share that gives this block its room has ended")


def _outcome(call: Callable[_P, Outcome], *args: _P.args, **kwargs: _P.kwargs) -> Outcome:
    """Call, and turn a store's error into an outcome."""
    try:
        return call(*args, **kwargs)
    except (LengthMismatch, FormatError):
        return Outcome.CORRUPT
    except TimedOut:
        return Outcome.TIMEOUT
    except StoreFull:
        return Outcome.NO_SPACE
    except StoreError:
        return Outcome.IO_ERROR


def _compressed(record: Buffer, codec: Codec) -> list[Buffer]:
    """The buffers of an object for this record. The checksums in its header stay those of the raw
    payload."""
    if codec is Codec.RAW:
        return [record]
    try:
        header = Header.read(record)
    except FormatError:
        return [record]  # a load will find it corrupt
    used, payload = encode(codec, record[HEADER_BYTES:])
    if used is Codec.RAW:
        return [record]
    head = memoryview(bytearray(record[:HEADER_BYTES]))
    header.codec = used
    header.stored_bytes = sum(len(piece) for piece in payload)
    header.write(head)
    return [head, *payload]


def decompress(stored: Buffer, header: Header, record: Buffer) -> None:
    """Write the record whose compressed form this is; raises FormatError unless it fits."""
    if header.stored_bytes != len(stored) - HEADER_BYTES:
        raise FormatError("the object is cut short")
    if header.payload_bytes != len(record) - HEADER_BYTES:
        raise FormatError(f"a payload of {header.payload_bytes} bytes does not fit its namespace")
    decode(header.codec, stored[HEADER_BYTES:], record[HEADER_BYTES:])
    record[:HEADER_BYTES] = stored[:HEADER_BYTES]
    header.codec = Codec.RAW
    header.stored_bytes = header.payload_bytes
    header.write(record)
