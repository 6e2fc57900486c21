"""The door by which every backend enters, ours and others': the entry point `kvtier.backends`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvtier.errors import BackendError, Unsupported
from kvtier.interfaces.handler import Handler, HostRegion
from kvtier.interfaces.tier import Tier, TierContext
from kvtier.settings import TierSettings
from kvtier.types import LoadStoreSpec

if TYPE_CHECKING:
    from kvtier.inspect import Inspector, InspectorContext

__all__ = ["GROUP", "Backend", "TierContext", "backend", "kinds"]

GROUP = "kvtier.backends"

S = TypeVar("S", bound=TierSettings)


class Backend(ABC, Generic[S]):
    """A kind of tier: its settings, its spec, and how to open its two halves and its inspector."""

    kind: str
    settings: type[S]
    spec: type[LoadStoreSpec]
    host: bool = False
    """Its medium is host memory (its handler is a `HostHandler`): it can be the first tier."""
    mapped: bool = False
    """And other processes of its engine can map that (`attach`): workers copy to and from it."""

    @abstractmethod
    def check(self, settings: S, record_bytes: int | None) -> None:
        """Raise ConfigError (place relative to the tier, like ".path") on settings that cannot
        work; at last NotHere on what this machine lacks, NotWritable where they could be looked at
        all the same. `record_bytes` is None while the chunk size is not known."""

    @abstractmethod
    def open_tier(self, settings: S, context: TierContext) -> Tier:
        """Open the catalogue; creates the medium, raises MediumError if it cannot."""

    @abstractmethod
    def open_handler(self, settings: S, context: TierContext) -> Handler:
        """Open the data side of a medium that `open_tier` has created, maybe elsewhere."""

    def attach(self, path: Path) -> HostRegion:
        """Map host memory that the engine's tier has made, in another of its processes."""
        raise Unsupported(f"no other process can map the memory of a tier of kind {self.kind}")

    def find_region(self, settings: S, engine: str) -> Path | None:
        """What `attach` maps for the engine that goes by this name (`HostRegion.name_engine`); None
        while it is not there."""
        return None

    def begin_memory(self, settings: S, near: Sequence[int]) -> None:
        """For a process that is about to open the tier: take its memory in the meantime."""

    def open_inspector(self, settings: S, context: InspectorContext) -> Inspector[S]:
        """Look at the medium from outside, for the command line; opens, locks and makes nothing.
        This one sees nothing, and says so."""
        from kvtier.inspect import Inspector  # which engines need not import

        return Inspector(self, settings, context)

    def at_url(self, url: str) -> S | None:
        """The settings of an unlimited store at this url, if it is one of this kind."""
        return None

    def folder(self, settings: S) -> Path | None:
        """The folder in whose files its records lie as they are, if they do (`Tier.in_files`)."""
        return None

    def identity(self, settings: S) -> str | None:
        """What two tiers of one stack must not share (a path, a prefix); None if nothing."""
        return None


@cache
def _points() -> dict[str, set[EntryPoint]]:
    points: dict[str, set[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        points.setdefault(point.name, set()).add(point)
    return dict(sorted(points.items()))


def kinds(*, built_in: bool = False) -> list[str]:
    """The kinds of tier that are installed, ours and others', in order of their names."""
    return [
        kind
        for kind, points in _points().items()
        if not built_in or any(point.value.startswith("kvtier.") for point in points)
    ]


@cache
def backend(kind: str) -> Backend[Any]:
    """Import the backend of this kind; raises BackendError if there is none or it is broken.

    Only the kinds that a stack names are imported, so that a broken one hurts nobody else.
    """
    points = _points().get(kind, set())
    if not points:
        raise BackendError(f"no tier kind {kind!r} is installed; there are: {', '.join(kinds())}")
    if len(points) > 1:
        places = " and ".join(sorted(point.value for point in points))
        raise BackendError(f"tier kind {kind!r} is installed twice: {places}; uninstall one")
    (point,) = points
    try:
        found = point.load()
    except Exception as error:  # whatever its package raises, be it for the lack of a device
        raise BackendError(
            f"tier kind {kind!r} ({point.value}) cannot be imported: {error}; "
            "reinstall the package that brings it"
        ) from error
    if not isinstance(found, Backend) or found.kind != kind:
        raise BackendError(
            f"the entry point {kind!r} ({point.value}) does not name a Backend of that kind; "
            "correct the package that brings it"
        )
    return found
