"""The door by which every backend enters, ours and others': the entry point `kvtier.backends`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

import msgspec

from kvtier.core.settings import TierSettings
from kvtier.core.tier import Handler, Tier
from kvtier.types import LoadStoreSpec, Namespace

GROUP = "kvtier.backends"

S = TypeVar("S", bound=TierSettings)


class TierContext(msgspec.Struct, frozen=True):
    """What a backend is told beside its settings. Crosses to the mover's process."""

    namespace: Namespace
    engine: str = "default"
    """Names this engine among those of one machine: private media (the CPU region) carry it."""


class Backend(ABC, Generic[S]):
    """A kind of tier: its settings, its spec, and how to open its two halves."""

    kind: str
    settings: type[S]
    spec: type[LoadStoreSpec]

    @abstractmethod
    def check(self, settings: S, record_bytes: int | None) -> None:
        """Raise ConfigError (place relative to the tier, like ".path") on settings that cannot
        work on this machine; `record_bytes` is None while the chunk size is not known."""

    @abstractmethod
    def open_tier(self, settings: S, context: TierContext) -> Tier:
        """Open the catalogue; creates the medium, raises MediumError if it cannot."""

    @abstractmethod
    def open_handler(self, settings: S, context: TierContext) -> Handler:
        """Open the data side of a medium that `open_tier` has created, maybe elsewhere."""

    def identity(self, settings: S) -> str | None:
        """What two tiers of one stack must not share (a path, a prefix); None if nothing."""
        return None


@cache
def backends() -> dict[str, Backend[Any]]:
    """All installed backends by kind, ours and others'."""
    found: dict[str, Backend[Any]] = {}
    for point in entry_points(group=GROUP):
        backend = point.load()
        found[backend.kind] = backend
    return dict(sorted(found.items()))
