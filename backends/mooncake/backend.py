"""Opens the two halves of a Mooncake tier, and says what can be known of a pool from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.backends.mooncake.client import MooncakeSettings, store_module
from kvtier.backends.mooncake.handler import MooncakeHandler
from kvtier.backends.mooncake.tier import MooncakeSpec, MooncakeTier
from kvtier.errors import ConfigError, ExtraMissing, MediumError, NotHere
from kvtier.eviction import create_policy, policy_class
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.settings import check_capacity

if TYPE_CHECKING:
    from kvtier.inspect import Inspector, InspectorContext


class MooncakeBackend(Backend[MooncakeSettings]):
    """Blocks in the memory of other machines."""

    kind = "mooncake"
    settings = MooncakeSettings
    spec = MooncakeSpec

    def check(self, settings: MooncakeSettings, record_bytes: int | None) -> None:
        policy_class(settings.eviction)  # which raises ConfigError
        if settings.capacity.share is not None:
            raise ConfigError(
                ".capacity",
                f"is {settings.capacity}, and nobody knows here how large the pool is",
                "write a size, like 512GiB",
            )
        check_capacity(settings.capacity, settings.capacity.resolve(0), record_bytes or 4096)
        try:
            store_module()
        except (ExtraMissing, MediumError) as error:
            raise NotHere(".kind", str(error)) from error

    def open_tier(self, settings: MooncakeSettings, context: TierContext) -> MooncakeTier:
        capacity = settings.capacity.resolve(0)
        return MooncakeTier(context.namespace, capacity, create_policy(settings.eviction))

    def open_handler(self, settings: MooncakeSettings, context: TierContext) -> MooncakeHandler:
        return MooncakeHandler(settings, context.namespace)

    def open_inspector(
        self, settings: MooncakeSettings, context: InspectorContext
    ) -> Inspector[MooncakeSettings]:
        from kvtier.backends.mooncake.inspect import MooncakeInspector

        return MooncakeInspector(self, settings, context)

    def identity(self, settings: MooncakeSettings) -> str | None:
        return f"mooncake:{settings.master}/{settings.prefix}"


BACKEND = MooncakeBackend()
