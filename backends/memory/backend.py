"""Opens both halves of a memory tier on one store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvtier.backends.memory.handler import MemoryHandler
from kvtier.backends.memory.settings import MemorySettings
from kvtier.backends.memory.store import MemorySpec, MemoryStore
from kvtier.backends.memory.tier import MemoryTier
from kvtier.core.interfaces.backend import Backend, TierContext
from kvtier.core.settings import Capacity, check_capacity
from kvtier.errors import ConfigError, MediumError

if TYPE_CHECKING:
    from kvtier.core.inspection import Inspector, InspectorContext


class MemoryBackend(Backend[MemorySettings]):
    """Opens both halves on one store, which the handler finds by the engine's name."""

    kind = "memory"
    settings = MemorySettings
    spec = MemorySpec
    host = True

    def __init__(self) -> None:
        # Weak, because a store lives exactly as long as the tier or a handler that uses it.
        self._stores: WeakValueDictionary[tuple[str, str, str], MemoryStore] = WeakValueDictionary()

    def check(self, settings: MemorySettings, record_bytes: int | None) -> None:
        if settings.eviction != "lru":
            raise ConfigError(
                ".eviction", f"the memory tier has no {settings.eviction!r}", 'write "lru"'
            )
        check_capacity(settings.capacity, _resolve(settings.capacity), record_bytes or 1)

    def open_tier(self, settings: MemorySettings, context: TierContext) -> MemoryTier:
        store = MemoryStore(context.namespace, _resolve(settings.capacity))
        self._stores[_name(settings, context)] = store
        return MemoryTier(store)

    def open_handler(self, settings: MemorySettings, context: TierContext) -> MemoryHandler:
        store = self._stores.get(_name(settings, context))
        if store is None:
            raise MediumError(
                f"no memory tier {settings.name!r} of engine {context.engine!r} in this process: "
                "open its tier first, and run the mover on threads"
            )
        return MemoryHandler(store)

    def open_inspector(
        self, settings: MemorySettings, context: InspectorContext
    ) -> Inspector[MemorySettings]:
        from kvtier.backends.memory.inspector import MemoryInspector

        return MemoryInspector(self, settings, context)

    def identity(self, settings: MemorySettings) -> str | None:
        return f"memory:{settings.name}"


def _resolve(capacity: Capacity) -> int:
    return capacity.resolve(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _name(settings: MemorySettings, context: TierContext) -> tuple[str, str, str]:
    return context.engine, context.namespace.id, settings.name


BACKEND = MemoryBackend()
