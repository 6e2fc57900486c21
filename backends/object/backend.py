"""Opens the two halves of an object tier: the catalogue with its keeper, and the handler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtier.backends.object.budget import UNLIMITED
from kvtier.backends.object.caretaker import Limits, ProtectedBlocks
from kvtier.backends.object.handler import ObjectHandler, ObjectSpec
from kvtier.backends.object.keeper import Keeper, ReadOnlyKeeper
from kvtier.backends.object.lease import LEASE_S
from kvtier.backends.object.settings import (
    ObjectSettings,
    capacity_of,
    check_settings,
    open_for,
    parse_url,
)
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import Store
from kvtier.backends.object.tier import ObjectTier
from kvtier.errors import MediumError
from kvtier.eviction import create_policy, policy_class
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.record.codec import Codec, codec_for
from kvtier.settings import ByteSize, Capacity
from kvtier.types import Namespace

if TYPE_CHECKING:
    from kvtier.inspect import Inspector, InspectorContext

_log = logging.getLogger(__name__)


class ObjectBackend(Backend[ObjectSettings]):
    """Blocks in a bucket or a folder that many servers share."""

    kind = "object"
    settings = ObjectSettings
    spec = ObjectSpec

    def check(self, settings: ObjectSettings, record_bytes: int | None) -> None:
        policy_class(settings.eviction)  # which raises ConfigError
        check_settings(settings, record_bytes or 4096)

    def open_tier(
        self,
        settings: ObjectSettings,
        context: TierContext,
        store: Store | None = None,
        lease_s: float = LEASE_S,
        protected: ProtectedBlocks | None = None,
    ) -> ObjectTier:
        limits = Limits(
            capacity=capacity_of(settings),
            refresh_s=settings.refresh.seconds,
            audit_s=settings.audit.seconds,
            age_max_s=settings.age_max.seconds if settings.age_max else None,
            lease_s=lease_s,
            protected=protected or {},
        )
        try:
            kind = ReadOnlyKeeper if settings.only_read else Keeper
            keeper = kind(store or open_for(settings), context.namespace, limits)
        except StoreError as error:
            raise MediumError(str(error)) from error
        tier = ObjectTier(keeper, create_policy(settings.eviction))
        try:
            _begin(keeper, tier, settings)
        except BaseException:  # who lives on must not seem to use the store
            keeper.close()
            raise
        return tier

    def open_handler(
        self, settings: ObjectSettings, context: TierContext, store: Store | None = None
    ) -> ObjectHandler:
        try:
            store = store or open_for(settings)
        except StoreError as error:
            raise MediumError(str(error)) from error
        return ObjectHandler(
            store,
            context.namespace,
            _codec(settings, context.namespace),
            threads=settings.threads,
            load_s=settings.load_deadline.seconds,
            store_s=settings.store_deadline.seconds,
        )

    def open_inspector(
        self, settings: ObjectSettings, context: InspectorContext
    ) -> Inspector[ObjectSettings]:
        from kvtier.backends.object.inspection.inspector import ObjectInspector

        return ObjectInspector(self, settings, context)

    def at_url(self, url: str) -> ObjectSettings | None:
        return ObjectSettings(url=url, capacity=Capacity(ByteSize(UNLIMITED)))

    def identity(self, settings: ObjectSettings) -> str | None:
        folder = parse_url(settings.url).folder
        if folder is not None:
            return str(folder.resolve())
        return f"object:{settings.endpoint or ''}{settings.url.rstrip('/')}"


def _begin(keeper: Keeper, tier: ObjectTier, settings: ObjectSettings) -> None:
    try:
        keeper.open(tier.offered)
        keeper.await_election()
    except StoreError as error:
        if settings.unreachable == "refuse":
            raise MediumError(str(error)) from error
        _log.warning("the object store cannot be used yet, going on without it: %s", error)
    tier.start()
    keeper.start()


def _codec(settings: ObjectSettings, namespace: Namespace) -> Codec:
    if settings.codec == "auto" and parse_url(settings.url).folder is not None:
        return Codec.RAW
    facts = namespace.facts
    cached_as = facts.get("kv_dtype", "auto")
    return codec_for(settings.codec, facts.get("dtype", "") if cached_as == "auto" else cached_as)


BACKEND = ObjectBackend()
