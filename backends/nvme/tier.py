"""The catalogue of an NVMe folder: what it may write is metered, and workers may read its files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvtier.backends.nvme.medium import NvmeSpec
from kvtier.backends.nvme.write_budget import written_bytes
from kvtier.eviction import EvictionPolicy
from kvtier.interfaces.handler import own_spec
from kvtier.interfaces.write_budget import WriteAllowance
from kvtier.slab.folder_tier import FolderTier
from kvtier.slab.keeper import SlabKeeper
from kvtier.slab.layout import SLOT_BITS, SLOT_MASK
from kvtier.types import BlockKey, FilePlace, LoadStoreSpec, Outcome, Reservation

_WRITTEN = (Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.NO_SPACE)
"""What failed in these ways may have been written for all that is known."""


class NvmeTier(FolderTier):
    """Slabs on a local disk. It spends its allowance as slots are reserved: so what is under way
    never exceeds that."""

    in_files = True

    def __init__(
        self,
        keeper: SlabKeeper,
        policy: EvictionPolicy,
        clock: Callable[[], float] = time.time,
        allowance: WriteAllowance | None = None,
    ) -> None:
        super().__init__("nvme", keeper, policy, clock)
        self.allowance = allowance
        self._namespace = keeper.folder.namespace

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        reservation = super().prepare_store(keys, evict=evict)
        if self.allowance is not None and reservation.keys:
            self.allowance.spend(written_bytes(self._namespace, reservation.keys))
        return reservation

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        if self.allowance is not None and failed:
            reserved = self._reserved
            spared = [key for key, why in failed.items() if why not in _WRITTEN and key in reserved]
            self.allowance.spend(-written_bytes(self._namespace, spared))
        super().complete_store(keys, failed)

    def _locate(self, slots: list[int]) -> NvmeSpec:
        return NvmeSpec(self._places.where(slots), self._keeper.owner)

    def files(self, spec: LoadStoreSpec) -> list[FilePlace]:
        folder, size = self._keeper.folder, self.slot_bytes
        return [
            FilePlace(str(folder.data_path(place >> SLOT_BITS)), (place & SLOT_MASK) * size)
            for place in own_spec(spec, NvmeSpec).places
        ]
