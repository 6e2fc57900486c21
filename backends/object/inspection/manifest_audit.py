"""What the manifests of a store name, against what is there, for copies from it and into it.

Who copies from a store reads its manifests, because a listing takes minutes. But whoever stores in
it may be killed, or lose the store, before it has written down what it did. Where engines use the
store their next audit makes up for that; in one that only holds snapshots nobody lists anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.inspection.store_access import opened_store
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries
from kvtier.backends.object.manifests.reconcile import Reconciliation
from kvtier.backends.object.object_names import blocks_prefix, parse_block
from kvtier.backends.object.settings import ObjectSettings
from kvtier.backends.object.stores.store import ObjectInfo, Store
from kvtier.errors import MediumError
from kvtier.inspect import CopyAudit, Reporter
from kvtier.types import BlockKey, Namespace

_AT_ONCE = 4096


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
                entries = Journal(store, self._namespace).read_all()
        except MediumError as error:
            self._reporter.warn(f"what the store tells of its blocks cannot be read: {error}")
            return len(expected)
        recorded = manifest.fingerprints(entries[entries["kind"] == ADDED])
        return int(np.isin(expected, recorded, invert=True).sum())


def _marks(keys: Sequence[BlockKey]) -> npt.NDArray[np.uint64]:
    return manifest.fingerprints(manifest.objects_of(keys, [0] * len(keys)))


def find_unrecorded(
    store: Store, namespace: Namespace, where: str, reporter: Reporter
) -> Entries | None:
    """Entries for the blocks that a listing finds and no manifest names; None if there are none."""
    stated = Reconciliation(Journal(store, namespace).read_all())
    pieces = []
    with reporter.progress(f"listing {where}:", 0, "objects") as bar:
        listed = store.list(blocks_prefix(namespace.id))
        while some := list(islice(listed, _AT_ONCE)):
            bar.advance(len(some))
            pieces.append(_unrecorded(some, stated))
    found = [piece for piece in pieces if len(piece)]
    return np.concatenate(found) if found else None


def _unrecorded(listed: Sequence[ObjectInfo], stated: Reconciliation) -> Entries:
    """Entries for those of these objects that are blocks and that nothing tells of. What is there
    because its deletion failed is told of: as removed."""
    blocks = [(info, parsed) for info in listed if (parsed := parse_block(info.name))]
    entries = manifest.pack_entries(
        ADDED,
        [key for _, (_, key, _) in blocks],
        [generation for _, (_, _, generation) in blocks],
        [info.size for info, _ in blocks],
        [int(info.modified_s * 1e6) for info, _ in blocks],
    )
    rows = stated.find(entries)
    unrecorded = rows < 0
    about = stated.entries[rows[~unrecorded]]
    again = (about["kind"] == REMOVED) & (about["time_us"] < entries["time_us"][~unrecorded])
    unrecorded[~unrecorded] = again
    return entries[unrecorded]
