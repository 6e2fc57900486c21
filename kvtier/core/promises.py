"""What lookup promises: room in host memory for every hit, until the engine's step is over."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.core.direct import DirectReads
from kvtier.core.ledger import Ledger
from kvtier.core.plan import HOST, plan_room
from kvtier.core.tier import Tier
from kvtier.types import BlockKey


class Promises:
    """Keeps account of host memory's slots: what is taken, and what was promised."""

    def __init__(self, host: Tier, slots: int, ledger: Ledger, direct: DirectReads) -> None:
        self._host = host
        self._slots = slots
        self._direct = direct
        self._free: int | None = None
        self.kept = ledger.promised

    @property
    def slotless(self) -> frozenset[int]:
        """The tiers whose blocks do not come through host memory."""
        return self._direct.tiers

    def room(self) -> int:
        """Host slots that hits can still be promised."""
        if self._free is None:
            host = self._host.stats()
            self._free = self._slots - host.pinned - host.in_flight - host.quarantined
        return self._free - len(self.kept)

    def make(self, keys: Sequence[BlockKey], origins: list[int]) -> list[int]:
        """Take back what there is no room for, and hold the room of the rest."""
        slotless = self.slotless
        origins = plan_room(keys, origins, self.kept, self.room(), slotless)
        hits = zip(keys, origins, strict=True)
        if min(origins, default=HOST) >= HOST and not slotless:
            self.kept.update(hits)
        else:
            self.kept.update([hit for hit in hits if hit[1] >= HOST and hit[1] not in slotless])
        return origins

    def count_again(self) -> None:
        """Slots may have been taken, or set free."""
        self._free = None

    def end(self) -> None:
        """What was promised no longer is."""
        self.kept.clear()
        self._free = None
