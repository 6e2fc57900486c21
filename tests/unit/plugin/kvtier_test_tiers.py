"""Kinds of tier as another package brings them: enough of them to configure, never opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from kvtier.errors import ConfigError
from kvtier.interfaces.backend import Backend, TierContext
from kvtier.settings import ByteSize, Count, Secret, TierSettings, WritePolicy
from kvtier.types import LoadStoreSpec


class NowhereSpec(LoadStoreSpec):
    """A medium that does not exist."""


class BenchSettings(TierSettings, frozen=True, kw_only=True, tag="bench"):
    """Host memory of a test."""

    name: str = "bench"


class Access(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who asks."""

    user: str
    """A name."""
    token: Secret | None = None
    tries: Count = 3


class ShelfSettings(TierSettings, frozen=True, kw_only=True, tag="shelf"):
    """A folder of a test."""

    path: Path
    """Where it is."""
    part_size: ByteSize = ByteSize(8 << 20)
    access: Access | None = None
    door: Access = Access(user="nobody")
    rate: float = 1.0
    open: bool = True
    colour: Literal["red", "green"] | None = None
    write: WritePolicy = WritePolicy.ON_EVICT


class _Nowhere(Backend[Any]):
    spec = NowhereSpec

    def check(self, settings: Any, record_bytes: int | None) -> None:
        size = settings.capacity.resolve(1 << 40)
        if size < (record_bytes or 1):
            raise ConfigError(".capacity", f"{settings.capacity} holds no block", "write more")

    def open_tier(self, settings: Any, context: TierContext) -> NoReturn:
        raise AssertionError("configuring a stack opens nothing")

    def open_handler(self, settings: Any, context: TierContext) -> NoReturn:
        raise AssertionError("configuring a stack opens nothing")


class Bench(_Nowhere):
    kind = "bench"
    settings = BenchSettings
    host = True


class Shelf(_Nowhere):
    kind = "shelf"
    settings = ShelfSettings

    def check(self, settings: ShelfSettings, record_bytes: int | None) -> None:
        super().check(settings, record_bytes)
        if not settings.path.is_dir():
            raise ConfigError(".path", f"there is no folder {settings.path}", "make it")

    def identity(self, settings: ShelfSettings) -> str:
        return str(settings.path.resolve())


BENCH = Bench()
SHELF = Shelf()
STRANGER = object()
