"""What objects of a store are worth: read whole, and checked."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kvtier.backends.object.handler import decompress
from kvtier.backends.object.settings import ObjectSettings, open_for
from kvtier.backends.object.stores.errors import LengthMismatch, StoreError
from kvtier.backends.object.stores.store import Store
from kvtier.errors import FormatError, MediumError
from kvtier.inspect.contents import Block
from kvtier.inspect.inspector import NEWER, Proof, Prover, Verdict, is_newer, judge
from kvtier.record.record import CODEC_RAW, HEADER_BYTES, Header, record_bytes
from kvtier.types import PAYLOAD_BYTES_MAX, Namespace


class StoreProver(Prover):
    """Reads objects whole and checks them. `where` of a block is its object's name."""

    def __init__(self, settings: ObjectSettings, namespaces: Mapping[str, Namespace]) -> None:
        self._settings = settings
        self._namespaces = namespaces
        self._store: Store | None = None
        self._opening = threading.Lock()

    def _opened(self) -> Store:
        with self._opening:  # several threads prove at once
            if self._store is None:
                try:
                    self._store = open_for(self._settings)
                except StoreError as error:
                    raise MediumError(str(error)) from error
            return self._store

    def bytes_of(self, block: Block) -> int:
        """What an object says itself does not count: it is unpacked only if it has the size that
        its namespace says."""
        namespace = self._namespaces.get(block.namespace)
        if namespace is None:
            return super().bytes_of(block)
        return block.bytes + 2 * record_bytes(namespace.payload_of(block.key))

    def prove(self, block: Block) -> Verdict:
        if not HEADER_BYTES <= block.bytes <= HEADER_BYTES + PAYLOAD_BYTES_MAX:
            return Verdict(Proof.BAD, f"an object of {block.bytes} bytes is no record")
        stored = memoryview(bytearray(block.bytes))
        try:
            length = self._opened().get(block.where, stored)
        except LengthMismatch as error:
            return Verdict(Proof.BAD, str(error))
        except StoreError as error:
            return Verdict(Proof.UNREAD, str(error))
        if length is None:
            return Verdict(Proof.GONE, "it was deleted meanwhile")
        stored = stored[:length]
        if is_newer(stored):
            return NEWER
        try:
            return judge(_raw(stored, block, self._namespaces.get(block.namespace)), block)
        except FormatError as error:
            return Verdict(Proof.BAD, str(error))
        except MediumError as error:
            return Verdict(Proof.UNREAD, str(error))

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _raw(stored: memoryview, block: Block, namespace: Namespace | None) -> memoryview:
    """The record as it is on all other media; raises FormatError if it cannot be one, MediumError
    if that cannot be told."""
    header = Header.read(stored)
    if header.stored_bytes != len(stored) - HEADER_BYTES:
        raise FormatError("the object is cut short")
    if header.codec == CODEC_RAW:
        return stored
    if namespace is None:
        # Its description may be lost, or could not be read just now: that is no proof against it.
        raise MediumError("it is compressed, and nothing says how large its payload should be")
    size = namespace.payload_of(block.key)
    record = memoryview(bytearray(record_bytes(size)))
    decompress(stored, header, record[: HEADER_BYTES + size])
    return record
