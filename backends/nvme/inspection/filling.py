"""How a copy fills a folder: alone among commands, beside engines that run there."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from kvtier.backends.nvme.folder.files import used_bytes
from kvtier.backends.nvme.inspection.offline_locks import filling_alone, sparing
from kvtier.backends.nvme.settings import NvmeSettings, slab_bytes
from kvtier.backends.nvme.tier import NvmeTier
from kvtier.inspect import Filling
from kvtier.interfaces.tier import Tier
from kvtier.record.record import record_bytes
from kvtier.settings import ByteSize, Capacity, WritePolicy
from kvtier.types import BlockKey, Namespace


class NvmeFilling(Filling[NvmeSettings]):
    """Fills slabs of its own, which the next engine adopts."""

    def alone(self) -> AbstractContextManager[None]:
        folder = Path(self.settings.path)
        said = f"another command is filling {folder}: waiting until it has ended"
        return filling_alone(folder, lambda: self.reporter.warn(said))

    def opened_settings(self) -> NvmeSettings:
        """In a folder that the stack only reads, how much others keep is up to them."""
        taking = super().opened_settings()
        if self.settings.write is not WritePolicy.NEVER:
            return taking
        room = max(self.capacity, used_bytes(Path(self.settings.path)))
        return msgspec.structs.replace(taking, capacity=Capacity(ByteSize(room)))

    def heed_retained(self, tier: Tier, namespace: Namespace) -> None:
        """What any engine of the namespace does: the copy evicts from the slabs of all that are
        gone."""
        if isinstance(tier, NvmeTier) and self.keeps():
            tier.retain_as_others()

    def block_bytes(self, namespace: Namespace) -> list[int]:
        return [record_bytes(namespace.payload_bytes)]  # a whole slot

    def taken(self, blocks: int, room: int, block_bytes: Sequence[int]) -> int:
        """Whole slabs, because each slab holds blocks of one namespace."""
        (slot_bytes,) = block_bytes
        slots = max(1, slab_bytes(self.capacity) // slot_bytes)
        return -(-blocks // slots) * slots * slot_bytes

    def protect(
        self, namespace: Namespace, keys: Callable[[], Set[BlockKey]]
    ) -> AbstractContextManager[None]:
        return sparing(Path(self.settings.path), namespace)
