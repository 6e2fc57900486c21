"""How a copy fills a store: beside all servers that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import msgspec

from kvtier.backends.object.budget.budget import UNLIMITED
from kvtier.backends.object.housekeeping.use_counts import Uses
from kvtier.backends.object.inspection.manifest_audit import ManifestCopyAudit
from kvtier.backends.object.inspection.store_access import opened_store
from kvtier.backends.object.settings import ObjectSettings
from kvtier.inspect import Filling, InspectorContext
from kvtier.inspect.filling import TierOpener
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import Tier
from kvtier.record.record import HEADER_BYTES
from kvtier.settings import ByteSize, Capacity, WritePolicy
from kvtier.types import BlockKey, Namespace


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
            Uses(store, namespace, 0.0).carry(used)

    def audit(self, namespace: Namespace) -> ManifestCopyAudit:
        return ManifestCopyAudit(self.settings, namespace, self.reporter)
