"""What lies below an object tier's url, seen through one listing, or through its manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from kvtier.backends.object.inspection.checks import check_store
from kvtier.backends.object.inspection.copies import ManifestSource, ObjectFilling, find_unrecorded
from kvtier.backends.object.inspection.garbage import find_garbage
from kvtier.backends.object.inspection.proofs import StoreProver
from kvtier.backends.object.inspection.store_access import (
    delete_objects,
    local_folder,
    measuring_prefix,
    opened_store,
    remove_namespace,
)
from kvtier.backends.object.inspection.store_survey import StoreSurvey, closed
from kvtier.backends.object.object_names import blocks_prefix, parse_block
from kvtier.backends.object.settings import ObjectSettings, capacity_of, open_for
from kvtier.backends.object.stores.errors import StoreError
from kvtier.backends.object.stores.store import ObjectInfo
from kvtier.errors import ConfigError, MediumError
from kvtier.inspect import (
    Block,
    Cleared,
    Depth,
    Finding,
    Garbage,
    Inspector,
    InspectorContext,
    Part,
    Prover,
    Reach,
    Source,
)
from kvtier.inspect.contents import standing
from kvtier.inspect.filling import TAKE_ALL, TierOpener
from kvtier.record.record import record_bytes
from kvtier.system.disk import Disk
from kvtier.types import Namespace


class ObjectInspector(Inspector[ObjectSettings]):
    """Looks at a store; one that is down is a trouble, not an error."""

    reach = Reach.SHARED

    def __init__(
        self, opener: TierOpener, settings: ObjectSettings, context: InspectorContext
    ) -> None:
        super().__init__(opener, settings, context)
        self._survey = StoreSurvey()

    def where(self) -> str:
        return self.settings.url

    def folder(self) -> Path | None:
        return local_folder(self.settings.url)

    def unusable(self) -> ConfigError | None:
        """Such as a profile that another user may have. Makes no request."""
        if self.folder() is None:
            try:
                open_for(self.settings).close()
            except StoreError as error:
                problem, _, remedy = str(error).partition(": ")
                return ConfigError(f"$.tiers[{self.tier}]", problem, remedy)
        return None

    # -- what is there

    def _look(self, depth: Depth, uses_of: str | None) -> None:
        found, folder = self.contents, self.folder()
        found.capacity = capacity_of(self.settings)
        if folder is not None:
            found.free = Disk().free_bytes(standing(folder))
        self._survey = StoreSurvey(self.tier, self.kind, found, uses_of, self.reporter)
        if folder is None or folder.exists():  # opening the store would make it
            try:
                with opened_store(self.settings) as store:
                    self._survey.look(store, depth)
            except MediumError:
                found.unseen = not found.parts
                raise
        found.unseen = False

    def blocks(self, namespace: str = "", begins: Sequence[str] = ("",)) -> Iterator[Block]:
        """Lists anew: of millions nobody holds a list."""
        for name in sorted(part.namespace for part in self.contents.parts):
            if not name.startswith(namespace):
                continue
            uses = self._survey.used_blocks.get(name)
            for info in self._list([blocks_prefix(name, digits) for digits in begins]):
                if (parsed := parse_block(info.name)) is None:
                    continue
                _, key, _ = parsed
                hits, used = (None, None) if uses is None else uses.get(key, (0, 0.0))
                yield Block(
                    tier=self.tier,
                    kind=self.kind,
                    namespace=name,
                    key=key,
                    bytes=info.size,
                    stored_at=info.modified_s,
                    hits=hits,
                    used=used or None,
                    place=info.name,
                )

    def _list(self, prefixes: Iterable[str]) -> Iterator[ObjectInfo]:
        with self.noting_troubles(), opened_store(self.settings) as store:
            for prefix in prefixes:
                yield from store.list(prefix)

    def prover(self, namespaces: Mapping[str, Namespace]) -> Prover:
        return StoreProver(self.settings, namespaces)

    def quarantine(self, blocks: Sequence[Block]) -> int:
        """Delete bad objects: a reader that meets the gap counts a miss."""
        return delete_objects(self.settings, [block.where for block in blocks])

    # -- what goes

    def garbage(self, idle_s: float | None) -> Iterator[Garbage]:
        served = self._survey.served
        with self.noting_troubles():
            yield from find_garbage(self.settings, self.contents, served, idle_s, self.reporter)

    def clear(self, part: Part) -> Iterator[Cleared]:
        yield self.try_to_clear(part, partial(self._remove, part.namespace))

    def _remove(self, namespace: str) -> None:
        remove_namespace(self.settings, namespace, self.reporter)
        self.forget_troubles(closed(self.contents.where, namespace))

    # -- how it does

    def checks(self) -> Iterator[Finding]:
        return check_store(self.area(), self.settings)

    def measuring_place(self, room: int) -> AbstractContextManager[ObjectSettings]:
        if self.folder() is not None:
            return super().measuring_place(room)
        taking = msgspec.structs.replace(self.settings, **TAKE_ALL)
        return measuring_prefix(taking, self.reporter)

    def moved_to(self, folder: Path) -> dict[str, object]:
        return {"url": folder.as_uri()}

    # -- copies out of it and into it

    def sources(self, namespace: str) -> list[Source]:
        entries = self._survey.manifests.get(namespace)
        if entries is None:
            return []
        uses = self._survey.uses.get(namespace)
        return [
            ManifestSource(
                self.tier,
                self.kind,
                self._open_handler,
                entries,
                uses,
                waits=self.folder() is None,
            )
        ]

    def complete(self, namespace: str, room: int) -> None:
        found, survey = self.contents, self._survey
        parts = [part for part in found.parts if part.namespace.startswith(namespace)]
        sizes = [record_bytes(found.namespaces[part.namespace].payload_bytes) for part in parts]
        if sum(part.blocks * size for part, size in zip(parts, sizes, strict=True)) >= room:
            return
        with opened_store(self.settings) as store:
            for part in parts:
                described = found.namespaces[part.namespace]
                entries = find_unrecorded(store, described, found.where, self.reporter)
                if not len(entries):
                    continue
                self.reporter.warn(
                    f"{len(entries)} blocks of the namespace {part.namespace[:12]} are in "
                    f"{found.where}, and nothing written down there tells of them: who stored them "
                    "was cut off, or is about to say so; a listing has found them, and they are "
                    "copied, too"
                )
                survey.add(store, part, entries)

    def filling(self) -> ObjectFilling:
        return ObjectFilling(self.opener, self.settings, self.context, self.capacity())
