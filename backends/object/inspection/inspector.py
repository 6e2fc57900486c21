"""What lies below an object tier's url: by one listing, or by its manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object import namespaces
from kvtier.backends.object.inspection.checks import check_store
from kvtier.backends.object.inspection.copies import ManifestSource, ObjectFilling, StoreProver
from kvtier.backends.object.inspection.store_access import (
    delete_objects,
    find_garbage,
    measuring_prefix,
    opened_store,
    remove_namespace,
)
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, Entries
from kvtier.backends.object.object_names import (
    blocks_prefix,
    described_namespace,
    parse_block,
    parse_manifest,
)
from kvtier.backends.object.settings import ObjectSettings, capacity_of, open_for
from kvtier.backends.object.stores.errors import Forbidden, StoreError, TimedOut
from kvtier.backends.object.stores.store import (
    ObjectInfo,
    Store,
    check_namespaces,
    read_description,
)
from kvtier.backends.object.use_counts import count_uses, used_blocks
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
from kvtier.slab.layout import keys_of
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, Namespace

Counts = npt.NDArray[np.uint32]


class Recorded(msgspec.Struct):
    """What manifests tell of the blocks of a namespace."""

    entries: Entries
    uses: tuple[Counts, Counts] | None = None
    """How often each of these was used, and when last; None if nobody asked."""


class ObjectInspector(Inspector[ObjectSettings]):
    """Looks at a store; one that is down is a trouble, not an error."""

    reach = Reach.SHARED

    def __init__(
        self, opener: TierOpener, settings: ObjectSettings, context: InspectorContext
    ) -> None:
        super().__init__(opener, settings, context)
        self._forget()

    def _forget(self) -> None:
        self._uses_of: str | None = None
        """How the namespaces begin of which it is asked how often their blocks were used."""
        self._recorded: dict[str, Recorded] = {}
        self._used: dict[str, dict[BlockKey, tuple[int, float]]] = {}
        """By namespace, how often the blocks that a listing has found were used, and when last; it
        lacks those that never were, and namespaces of which nobody has counted it."""
        self._served: dict[str, float] = {}
        """By namespace, when a server last said in a store that it runs, or what it has used."""
        self._timed_out: TimedOut | None = None
        """What the store did not return in time."""

    def where(self) -> str:
        return self.settings.url

    def folder(self) -> Path | None:
        return self.settings.folder

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
        self._forget()
        self._uses_of = uses_of
        if folder is None or folder.exists():  # opening the store would make it
            try:
                with opened_store(self.settings) as store:
                    self.survey(store, depth)
            except MediumError:
                found.unseen = not found.parts
                raise
        found.unseen = False

    def survey(self, store: Store, depth: Depth) -> None:
        """Raises StoreError; what was found before that stays."""
        if depth is Depth.RECORDED:
            self._read_manifests(store)
        elif depth is Depth.COUNTED:
            self._count(store)
        else:
            self._name(store)

    def _name(self, store: Store) -> None:
        """Which namespaces have blocks, by the first of each."""
        failed: StoreError | None = None
        for name in namespaces.listed(store):
            if any(parse_block(info.name) for info in store.list(blocks_prefix(name))):
                part = self.part(name)
                self.contents.parts.append(part)
                failed = self._read_about(store, part) or failed
        if failed is not None:
            raise failed

    def _count(self, store: Store) -> None:
        parts: dict[str, Part] = {}
        found = self.contents
        failed: StoreError | None = None
        for info in self._listed(store):
            found.used += info.size
            parsed = parse_block(info.name)
            if parsed is None:
                if (described := described_namespace(info.name)) and not parse_manifest(info.name):
                    self._served[described] = max(info.modified_s, self._served.get(described, 0.0))
                continue
            name, key, _ = parsed
            part = parts.get(name)
            if part is None:
                part = parts[name] = self.part(name)
                check_namespaces(parts)
                failed = self._read_about(store, part) or failed
            part.blocks += 1
            part.bytes += info.size
            part.add_times(info.modified_s, info.modified_s)
            hits, used = self._used.get(name, {}).get(key, (0, 0.0))
            if hits:
                part.add_uses(hits, used)
        found.parts = sorted(parts.values(), key=lambda part: -part.bytes)
        if failed is not None:  # what is listed counts all the same
            raise failed

    def _read_about(self, store: Store, part: Part) -> StoreError | None:
        """What tells of a namespace whose first block was listed; why it could not be read, if
        so."""
        if self._timed_out is not None:  # a person waits for one, not for one a namespace
            return self._timed_out
        name = part.namespace
        try:
            with self._troubled_if_closed(name):
                namespace = self._describe(store, name)
                shown = self._uses_of is not None and name.startswith(self._uses_of)
                if shown and namespace and (found := used_blocks(store, name)) is not None:
                    self._used[name] = _by_key(found)
                    part.add_uses(0, 0.0)
        except StoreError as error:
            self._timed_out = error if isinstance(error, TimedOut) else None
            return error
        return None

    @contextmanager
    def _troubled_if_closed(self, name: str) -> Iterator[None]:
        """What may not be read of one namespace keeps no other from being looked at."""
        try:
            yield
        except Forbidden as error:
            self.contents.troubles.append(f"{closed(self.contents.where, name)}{error}")

    def _listed(self, store: Store) -> Iterator[ObjectInfo]:
        """All objects; to a person who waits it is said how many they are: a million take
        minutes."""
        with self.reporter.progress(f"listing {self.contents.where}:", 0, "objects") as bar:
            for info in store.list():
                bar.advance(1)
                yield info

    def _describe(self, store: Store, name: str) -> Namespace | None:
        namespace = read_description(store, name)
        if namespace is not None:
            self.contents.namespaces[name] = namespace
        return namespace

    def _read_manifests(self, store: Store) -> None:
        for name in namespaces.listed(store):
            with self._troubled_if_closed(name):
                self._read_namespace(store, name)

    def _read_namespace(self, store: Store, name: str) -> None:
        namespace = self._describe(store, name)
        if namespace is None:
            if any(parse_block(info.name) for info in store.list(f"{name}/")):
                self.contents.troubles.append(
                    f"nothing in {self.contents.where} says what the namespace {name} means: its "
                    "blocks are left alone; with a stack that has this url, kvtier clear "
                    f"{name[:12]} --tier object removes them"
                )
            return
        journal = Journal(store, name)
        entries = journal.read_all()
        if not journal.complete:
            self.contents.troubles.append(
                f"not all manifests of the namespace {name[:12]} in {self.contents.where} can be "
                "read: the blocks that these list are left out"
            )
        added = entries[entries["kind"] == ADDED]
        part = self.part(name)
        part.blocks = len(added)
        if len(added):
            part.bytes = int(added["size"].sum())
            times = added["time_us"] / 1e6
            part.add_times(float(times.min()), float(times.max()))
        shown = self._uses_of is not None and name.startswith(self._uses_of)
        self._recorded[name] = Recorded(added, count_uses(store, name, added) if shown else None)
        self.contents.parts.append(part)

    def blocks(self, namespace: str = "", begins: Sequence[str] = ("",)) -> Iterator[Block]:
        """Lists anew: of millions nobody holds a list."""
        for name in sorted(part.namespace for part in self.contents.parts):
            if not name.startswith(namespace):
                continue
            uses = self._used.get(name)
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
        with self.noting_troubles():
            yield from find_garbage(
                self.settings, self.contents, self._served, idle_s, self.reporter
            )

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
        found = self._recorded.get(namespace)
        if found is None:
            return []
        source = ManifestSource(self.tier, self.kind, self._open_handler)
        source.entries, source.uses, source.waits = found.entries, found.uses, self.folder() is None
        return [source]

    def filling(self) -> ObjectFilling:
        return ObjectFilling(self.opener, self.settings, self.context, self.capacity())


def closed(where: str, name: str) -> str:
    """How it begins what is said of a namespace of which something may not be read."""
    return f"of the namespace {name[:12]} in {where}: "


def _by_key(found: Entries) -> dict[BlockKey, tuple[int, float]]:
    uses = zip(found["size"].tolist(), (found["time_us"] / 1e6).tolist(), strict=True)
    return dict(zip(keys_of(found), uses, strict=True))
