"""What the manifests of a store tell of, against what is there.

Who copies from a store reads its manifests, because a listing takes minutes. But whoever stores in
it may be killed, or lose the store, before it has written down what it did. Where engines use the
store their next audit makes up for that; in one that only holds snapshots nobody lists anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.backends.object.housekeeping.use_counts import count_uses
from kvtier.backends.object.manifests import manifest
from kvtier.backends.object.manifests.journal import Journal
from kvtier.backends.object.manifests.manifest import ADDED, REMOVED, Entries
from kvtier.backends.object.manifests.reconcile import Reconciliation
from kvtier.backends.object.object_names import blocks_prefix, parse_block
from kvtier.backends.object.stores.store import ObjectInfo, Store
from kvtier.cli import console
from kvtier.cli.holdings import Part, Place
from kvtier.cli.look_objects import opened_store
from kvtier.config import StackConfig
from kvtier.core.records.record import record_bytes
from kvtier.core.settings import TierSettings
from kvtier.errors import MediumError
from kvtier.types import BlockKey, Namespace

_AT_ONCE = 4096


class Expected:
    """The blocks that a store should tell of once a copy has ended: eight bytes of each."""

    def __init__(self, settings: TierSettings, namespace: Namespace) -> None:
        self._settings = settings
        self._namespace = namespace
        self._there = [_marks([])]
        self._dropped = [_marks([])]

    def add(self, keys: Sequence[BlockKey]) -> None:
        """These are there."""
        self._there.append(_marks(keys))

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """These had to make room."""
        self._dropped.append(_marks(keys))

    def untold(self) -> int:
        """How many of them no manifest tells of: nobody will find them but by a listing. All, if
        the manifests cannot be read."""
        expected = np.setdiff1d(np.concatenate(self._there), np.concatenate(self._dropped))
        if not len(expected):
            return 0
        try:
            with opened_store(self._settings) as store:
                entries = Journal(store, self._namespace).read_all()
        except MediumError as error:
            console.warn(f"what the store tells of its blocks cannot be read: {error}")
            return len(expected)
        told = manifest.fingerprints(entries[entries["kind"] == ADDED])
        return int(np.isin(expected, told, invert=True).sum())


def _marks(keys: Sequence[BlockKey]) -> npt.NDArray[np.uint64]:
    return manifest.fingerprints(manifest.objects_of(keys, [0] * len(keys)))


def take_in_untold(config: StackConfig, places: Sequence[Place], wanted: str, room: int) -> None:
    """List the namespaces that begin so, and have places tell of the blocks that their manifests
    lack. Nothing is listed where what is told of fills all the room that there is. Raises
    MediumError."""
    for place in places:
        if place.kind != "object":
            continue
        parts = [part for part in place.parts if part.namespace.startswith(wanted)]
        sizes = [record_bytes(place.namespaces[part.namespace].payload_bytes) for part in parts]
        if sum(part.blocks * size for part, size in zip(parts, sizes, strict=True)) >= room:
            continue
        with opened_store(config.tiers[place.tier]) as store:
            for part in parts:
                _take_in(place, part, store)


def _take_in(place: Place, part: Part, store: Store) -> None:
    namespace = place.namespaces[part.namespace]
    stated = Reconciliation(Journal(store, namespace).read_all())
    pieces = [place.manifests[part.namespace]]
    with console.progress(f"listing {place.where}:", 0, "objects") as bar:
        listed = store.list(blocks_prefix(part.namespace))
        while some := list(islice(listed, _AT_ONCE)):
            bar.advance(len(some))
            pieces.append(_untold(some, stated))
    found = np.concatenate(pieces[1:]) if len(pieces) > 1 else pieces[0][:0]
    if not len(found):
        return
    console.warn(
        f"{len(found)} blocks of the namespace {part.namespace[:12]} are in {place.where}, and "
        "nothing written down there tells of them: who stored them was cut off, or is about to say "
        "so; a listing has found them, and they are copied, too"
    )
    place.manifests[part.namespace] = np.concatenate([pieces[0], found])
    if part.namespace in place.uses:
        place.uses[part.namespace] = count_uses(store, namespace, place.manifests[part.namespace])
    part.blocks += len(found)
    part.bytes += int(found["size"].sum())
    part.add_times(float(found["time_us"].min()) / 1e6, float(found["time_us"].max()) / 1e6)


def _untold(listed: Sequence[ObjectInfo], stated: Reconciliation) -> Entries:
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
    untold = rows < 0
    about = stated.entries[rows[~untold]]
    again = (about["kind"] == REMOVED) & (about["time_us"] < entries["time_us"][~untold])
    untold[~untold] = again
    return entries[untold]
