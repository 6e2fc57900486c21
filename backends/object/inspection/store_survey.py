"""What one look at a store finds: its namespaces, its blocks, and how often they were used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtier.backends.object import namespaces
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, Entries
from kvtier.backends.object.object_names import (
    blocks_prefix,
    described_namespace,
    parse_block,
    parse_manifest,
)
from kvtier.backends.object.stores.errors import Forbidden, StoreError, TimedOut
from kvtier.backends.object.stores.store import (
    ObjectInfo,
    Store,
    check_namespaces,
    read_description,
)
from kvtier.backends.object.use_counts import count_uses, used_blocks
from kvtier.inspect import Contents, Depth, Part, Reporter
from kvtier.slab.layout import keys_of
from kvtier.types import BlockKey, Namespace

Counts = npt.NDArray[np.uint32]


class StoreSurvey:
    """Fills the contents of a store's inspector, and keeps what only that knows what to do with."""

    def __init__(
        self,
        tier: int = 0,
        kind: str = "",
        contents: Contents | None = None,
        uses_of: str | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self._tier = tier
        self._kind = kind
        self._found = contents or Contents()
        self._uses_of = uses_of
        self._reporter = reporter or Reporter()
        self._timed_out: TimedOut | None = None
        """What the store did not return in time."""
        self.manifests: dict[str, Entries] = {}
        """By namespace, what is written down of its blocks."""
        self.uses: dict[str, tuple[Counts, Counts]] = {}
        """And how often each of these was used, and when last."""
        self.used_blocks: dict[str, dict[BlockKey, tuple[int, float]]] = {}
        """By namespace, how often the blocks that a listing has found were used, and when last; it
        lacks those that never were, and namespaces of which nobody has counted it."""
        self.served: dict[str, float] = {}
        """By namespace, when a server last said in a store that it runs, or what it has used."""

    def look(self, store: Store, depth: Depth) -> None:
        """Raises StoreError; what was found before that stays."""
        if depth is Depth.RECORDED:
            self._read_manifests(store)
        elif depth is Depth.COUNTED:
            self._count(store)
        else:
            self._name(store)

    def add(self, store: Store, part: Part, entries: Entries) -> None:
        """More blocks of a namespace than its manifests name."""
        name, times = part.namespace, entries["time_us"] / 1e6
        every = np.concatenate([self.manifests[name], entries])
        self.manifests[name] = every
        if name in self.uses:
            self.uses[name] = count_uses(store, name, every)
        part.blocks += len(entries)
        part.bytes += int(entries["size"].sum())
        part.add_times(float(times.min()), float(times.max()))

    def _part(self, namespace: str) -> Part:
        return Part(tier=self._tier, kind=self._kind, namespace=namespace, in_use=None)

    def _name(self, store: Store) -> None:
        """Which namespaces have blocks, by the first of each."""
        failed: StoreError | None = None
        for name in namespaces.listed(store):
            if any(parse_block(info.name) for info in store.list(blocks_prefix(name))):
                part = self._part(name)
                self._found.parts.append(part)
                failed = self._read_about(store, part) or failed
        if failed is not None:
            raise failed

    def _count(self, store: Store) -> None:
        parts: dict[str, Part] = {}
        found = self._found
        failed: StoreError | None = None
        for info in self._listed(store):
            found.used += info.size
            parsed = parse_block(info.name)
            if parsed is None:
                if (described := described_namespace(info.name)) and not parse_manifest(info.name):
                    self.served[described] = max(info.modified_s, self.served.get(described, 0.0))
                continue
            name, key, _ = parsed
            part = parts.get(name)
            if part is None:
                part = parts[name] = self._part(name)
                check_namespaces(parts)
                failed = self._read_about(store, part) or failed
            part.blocks += 1
            part.bytes += info.size
            part.add_times(info.modified_s, info.modified_s)
            hits, used = self.used_blocks.get(name, {}).get(key, (0, 0.0))
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
                    self.used_blocks[name] = _by_key(found)
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
            self._found.troubles.append(f"{closed(self._found.where, name)}{error}")

    def _listed(self, store: Store) -> Iterator[ObjectInfo]:
        """All objects; to a person who waits it is said how many they are: a million take
        minutes."""
        with self._reporter.progress(f"listing {self._found.where}:", 0, "objects") as bar:
            for info in store.list():
                bar.advance(1)
                yield info

    def _describe(self, store: Store, name: str) -> Namespace | None:
        namespace = read_description(store, name)
        if namespace is not None:
            self._found.namespaces[name] = namespace
        return namespace

    def _read_manifests(self, store: Store) -> None:
        for name in namespaces.listed(store):
            with self._troubled_if_closed(name):
                self._read_namespace(store, name)

    def _read_namespace(self, store: Store, name: str) -> None:
        namespace = self._describe(store, name)
        if namespace is None:
            if any(parse_block(info.name) for info in store.list(f"{name}/")):
                self._found.troubles.append(
                    f"nothing in {self._found.where} says what the namespace {name} means: its "
                    "blocks are left alone; with a stack that has this url, kvtier clear "
                    f"{name[:12]} --tier object removes them"
                )
            return
        entries = Journal(store, name).read_all()
        added = entries[entries["kind"] == ADDED]
        part = self._part(name)
        part.blocks = len(added)
        if len(added):
            part.bytes = int(added["size"].sum())
            times = added["time_us"] / 1e6
            part.add_times(float(times.min()), float(times.max()))
        self.manifests[name] = added
        if self._uses_of is not None and name.startswith(self._uses_of):
            self.uses[name] = count_uses(store, name, added)
        self._found.parts.append(part)


def closed(where: str, name: str) -> str:
    """How it begins what is said of a namespace of which something may not be read."""
    return f"of the namespace {name[:12]} in {where}: "


def _by_key(found: Entries) -> dict[BlockKey, tuple[int, float]]:
    uses = zip(found["size"].tolist(), (found["time_us"] / 1e6).tolist(), strict=True)
    return dict(zip(keys_of(found), uses, strict=True))
