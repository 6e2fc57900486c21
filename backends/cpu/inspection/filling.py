"""How a copy fills a region: it is its owner meanwhile, and holds one namespace."""

from __future__ import annotations

from typing import Any

from kvtier.backends.cpu.settings import CpuSettings
from kvtier.errors import KVTierError, MediumInUse
from kvtier.inspect import Filling
from kvtier.interfaces.handler import Handler
from kvtier.interfaces.tier import Tier
from kvtier.record.record import record_bytes
from kvtier.slab.inspect import SlabInspector
from kvtier.slab.layout import committed
from kvtier.types import Namespace


class CpuFilling(Filling[CpuSettings]):
    """Fills the region of the stack's own engine."""

    one_namespace = "host memory"

    def __init__(self, *args: Any, inspector: SlabInspector[CpuSettings]) -> None:
        super().__init__(*args)
        self._inspector = inspector

    def check(self, namespace: Namespace) -> None:
        found = self._inspector.look()
        if found.unseen:
            raise KVTierError(found.troubles[0])
        for slab in self._inspector.slabs:
            blocks = len(committed(slab.entries()))
            if slab.engine == self.engine and slab.namespace != namespace.id and blocks:
                raise KVTierError(
                    f"the CPU region of {self.engine!r} holds {blocks} blocks of the namespace "
                    f"{slab.namespace[:12]}, and would hold this one instead: remove them (kvtier "
                    f"clear {slab.namespace[:12]} --tier cpu), or fill another tier"
                )

    def open(self, namespace: Namespace) -> tuple[Tier, Handler]:
        try:
            return super().open(namespace)
        except MediumInUse:
            raise MediumInUse(
                f"the CPU region of {self.engine!r} is in use: stop its engine, or fill a tier "
                "that engines share, like nvme"
            ) from None

    def block_bytes(self, namespace: Namespace) -> list[int]:
        return [record_bytes(namespace.payload_bytes)]  # a whole slot
