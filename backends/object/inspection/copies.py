"""Blocks read out of a store, to be copied or proved, and copies into it.

A copy from a store reads its manifests, because a listing takes minutes: what a server that was
killed had not written down is copied after the next audit. A copy into a store is one more server
beside all that share it, and audits it if no other server is the caretaker.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object.budget import UNLIMITED
from kvtier.backends.object.handler import ObjectSpec, decompress
from kvtier.backends.object.inspection.store_access import opened_store
from kvtier.backends.object.manifests import Entries
from kvtier.backends.object.settings import ObjectSettings, open_for
from kvtier.backends.object.stores.errors import LengthMismatch, StoreError
from kvtier.backends.object.stores.store import Store
from kvtier.backends.object.use_counts import Uses
from kvtier.errors import FormatError, MediumError
from kvtier.inspect import Filling, InspectorContext
from kvtier.inspect.contents import Block
from kvtier.inspect.filling import ROW, HandlerSource, TierOpener
from kvtier.inspect.filling import Rows as SourceRows
from kvtier.inspect.inspector import NEWER, Proof, Prover, Verdict, is_newer, judge
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import Tier
from kvtier.record.record import CODEC_RAW, HEADER_BYTES, Header, record_bytes
from kvtier.settings import ByteSize, Capacity, WritePolicy
from kvtier.types import PAYLOAD_BYTES_MAX, BlockKey, LoadStoreSpec, Namespace

Counts = npt.NDArray[np.uint32]


class ManifestSource(HandlerSource):
    """Blocks of one namespace in a store. `at` is a block's generation."""

    entries: Entries
    uses: tuple[Counts, Counts] | None = None

    def rows(self) -> SourceRows:
        entries = self.entries
        rows = np.zeros(len(entries), ROW)
        rows["key"], rows["key_bytes"] = entries["key"], entries["key_bytes"]
        rows["at"], rows["bytes"] = entries["generation"], entries["size"]
        rows["stored_at"] = entries["time_us"] / 1e6
        if self.uses is not None:
            rows["uses"], rows["used_at"] = self.uses
        return rows

    def spec(self, at: Sequence[int]) -> LoadStoreSpec:
        return ObjectSpec(list(at))


class ObjectFilling(Filling[ObjectSettings]):
    """Two commands that store one block store one object: nobody need be alone."""

    def __init__(
        self, opener: TierOpener, settings: ObjectSettings, context: InspectorContext, capacity: int
    ) -> None:
        super().__init__(opener, settings, context, capacity)
        self._protected: dict[str, Set[BlockKey]] = {}

    def opened_settings(self) -> ObjectSettings:
        """Not for a store that is down. In one that the stack only reads, how much others keep, and
        for how long, is up to them."""
        taking = msgspec.structs.replace(super().opened_settings(), unreachable="refuse")
        if self.settings.write is not WritePolicy.NEVER:
            return taking
        unlimited = Capacity(ByteSize(UNLIMITED))
        return msgspec.structs.replace(taking, capacity=unlimited, age_max=None)

    def open(self, namespace: Namespace) -> tuple[Tier, Handler]:
        settings, context = self.opened_settings(), self.tier_context(namespace)
        opener: Any = self.opener  # which is told more here than backends are
        tier = opener.open_tier(settings, context, protected=dict(self._protected))
        return self.pair(tier, settings, context)

    @contextmanager
    def protect(self, namespace: Namespace, keys: Callable[[], Set[BlockKey]]) -> Iterator[None]:
        self._protected[namespace.id] = keys()
        yield

    def block_bytes(self, namespace: Namespace) -> list[int]:
        """Without padding, and less if they can be compressed."""
        return [HEADER_BYTES + size for size in namespace.group_bytes]

    def carry_uses(
        self, tier: Tier, namespace: Namespace, used: Mapping[BlockKey, tuple[int, float]]
    ) -> None:
        with opened_store(self.opened_settings()) as store:
            Uses(store, namespace.id, secrets.token_hex(8), 0.0).carry(used)


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
            length = self._opened().get(block.where, [stored])
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
