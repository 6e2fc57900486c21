"""Copies out of a store and into it.

Who copies from a store reads its manifests, because a listing takes minutes. But whoever stores in
it may be killed, or lose the store, before it has written down what it did. Where engines use the
store their caretaker's next audit makes up for that; in one that only holds snapshots nobody lists
anything. A copy into a store is one more server beside all that share it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backends.object import manifests
from kvtier.backends.object.block_index import BlockIndex
from kvtier.backends.object.budget import UNLIMITED
from kvtier.backends.object.handler import ObjectSpec
from kvtier.backends.object.inspection.store_access import opened_store
from kvtier.backends.object.journal import Journal
from kvtier.backends.object.manifests import ADDED, REMOVED, Entries
from kvtier.backends.object.object_names import blocks_prefix, parse_block
from kvtier.backends.object.settings import ObjectSettings
from kvtier.backends.object.stores.store import ObjectInfo, Store
from kvtier.backends.object.use_counts import Uses
from kvtier.errors import MediumError
from kvtier.inspect import CopyAudit, Filling, InspectorContext, Reporter
from kvtier.inspect.filling import ROW, HandlerSource, TierOpener
from kvtier.inspect.filling import Rows as SourceRows
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import Tier
from kvtier.record.record import HEADER_BYTES
from kvtier.settings import ByteSize, Capacity
from kvtier.types import BlockKey, LoadStoreSpec, Namespace

_AT_ONCE = 4096
Counts = npt.NDArray[np.uint32]


class ManifestSource(HandlerSource):
    """Blocks of one namespace in a store. `at` is a block's generation."""

    def __init__(
        self,
        tier: int,
        kind: str,
        open_handler: Callable[[Namespace], Handler],
        entries: Entries,
        uses: tuple[Counts, Counts] | None,
        *,
        waits: bool,
    ) -> None:
        super().__init__(tier, kind, open_handler)
        self._entries = entries
        self._uses = uses
        self.waits = waits

    def rows(self) -> SourceRows:
        entries = self._entries
        rows = np.zeros(len(entries), ROW)
        rows["key"], rows["key_bytes"] = entries["key"], entries["key_bytes"]
        rows["at"], rows["bytes"] = entries["generation"], entries["size"]
        rows["stored_at"] = entries["time_us"] / 1e6
        if self._uses is not None:
            rows["uses"], rows["used_at"] = self._uses
        return rows

    def spec(self, at: Sequence[int]) -> LoadStoreSpec:
        return ObjectSpec(list(at))


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
        if not self.settings.only_read:
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
            Uses(store, namespace.id, secrets.token_hex(8), 0.0).carry(used)

    def audit(self, namespace: Namespace) -> ManifestCopyAudit:
        return ManifestCopyAudit(self.settings, namespace, self.reporter)


class ManifestCopyAudit(CopyAudit):
    """The blocks that manifests should name once a copy has ended: eight bytes of each."""

    def __init__(self, settings: ObjectSettings, namespace: Namespace, reporter: Reporter) -> None:
        self._settings = settings
        self._namespace = namespace
        self._reporter = reporter
        self._there = [_marks([])]
        self._dropped = [_marks([])]

    def add(self, keys: Sequence[BlockKey]) -> None:
        self._there.append(_marks(keys))

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._dropped.append(_marks(keys))

    def missing(self) -> int:
        """All of them, if the manifests cannot be read."""
        expected = np.setdiff1d(np.concatenate(self._there), np.concatenate(self._dropped))
        if not len(expected):
            return 0
        try:
            with opened_store(self._settings) as store:
                entries = Journal(store, self._namespace.id).read_all()
        except MediumError as error:
            self._reporter.warn(f"what the store tells of its blocks cannot be read: {error}")
            return len(expected)
        recorded = manifests.key_prints(entries[entries["kind"] == ADDED])
        return int(np.isin(expected, recorded, invert=True).sum())


def _marks(keys: Sequence[BlockKey]) -> npt.NDArray[np.uint64]:
    return manifests.key_prints(manifests.pack_entries(0, keys, 0, 0, 0))


def find_unrecorded(store: Store, namespace: Namespace, where: str, reporter: Reporter) -> Entries:
    """Entries for the blocks that a listing finds and no manifest names."""
    stated = BlockIndex(Journal(store, namespace.id).read_all())
    pieces = []
    with reporter.progress(f"listing {where}:", 0, "objects") as bar:
        listed = store.list(blocks_prefix(namespace.id))
        while some := list(islice(listed, _AT_ONCE)):
            bar.advance(len(some))
            pieces.append(_unrecorded(some, stated))
    return manifests.joined(pieces)


def _unrecorded(listed: Sequence[ObjectInfo], stated: BlockIndex) -> Entries:
    """Entries for those of these objects that are blocks and that nothing tells of. What is there
    because its deletion failed is told of: as removed."""
    blocks = [(info, parsed) for info in listed if (parsed := parse_block(info.name))]
    entries = manifests.pack_entries(
        ADDED,
        [key for _, (_, key, _) in blocks],
        [generation for _, (_, _, generation) in blocks],
        [info.size for info, _ in blocks],
        [int(info.modified_s * 1e6) for info, _ in blocks],
    )
    rows = stated.find(entries)
    unrecorded = rows < 0
    about = stated.entries[rows[~unrecorded]]
    again = about["time_us"] < entries["time_us"][~unrecorded]
    unrecorded[~unrecorded] = again & (about["kind"] == REMOVED)
    return entries[unrecorded]
