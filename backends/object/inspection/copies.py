"""Copies out of a store and into it.

A copy from a store reads its manifests, because a listing takes minutes: what a server that was
killed had not written down is copied after the next audit. A copy into a store is one more server
beside all that share it, and audits it if no other server is the caretaker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object.budget import UNLIMITED
from kvtier.backends.object.handler import ObjectSpec
from kvtier.backends.object.inspection.store_access import opened_store
from kvtier.backends.object.manifests import Entries
from kvtier.backends.object.settings import ObjectSettings
from kvtier.backends.object.use_counts import Uses
from kvtier.inspect import Filling, InspectorContext
from kvtier.inspect.filling import ROW, HandlerSource, TierOpener
from kvtier.inspect.filling import Rows as SourceRows
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import Tier
from kvtier.record.record import HEADER_BYTES
from kvtier.settings import ByteSize, Capacity, WritePolicy
from kvtier.types import BlockKey, LoadStoreSpec, Namespace

Counts = npt.NDArray[np.uint32]


class ManifestSource(HandlerSource):
    """Blocks of one namespace in a store. `at` is a block's generation."""

    def __init__(
        self,
        tier: int,
        kind: str,
        open_handler: Callable[[Namespace], Handler],
        entries: Entries,
        uses: tuple[Counts, Counts] | None,
        *,
        waits: bool,
    ) -> None:
        super().__init__(tier, kind, open_handler)
        self._entries = entries
        self._uses = uses
        self.waits = waits

    def rows(self) -> SourceRows:
        entries = self._entries
        rows = np.zeros(len(entries), ROW)
        rows["key"], rows["key_bytes"] = entries["key"], entries["key_bytes"]
        rows["at"], rows["bytes"] = entries["generation"], entries["size"]
        rows["stored_at"] = entries["time_us"] / 1e6
        if self._uses is not None:
            rows["uses"], rows["used_at"] = self._uses
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
