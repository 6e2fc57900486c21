"""A tier that tells its allowance what is being written, whoever has it written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.backends.nvme.single_thread import SerializedTier
from kvtier.core.slab.layout import ENTRY_BYTES
from kvtier.record.record import record_bytes
from kvtier.types import BlockKey, Namespace, Outcome, Reservation

_ENTRIES = 2
"""The handler writes a block's entry before its record, and after it."""
_WRITTEN = (Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.NO_SPACE)
"""What failed in these ways may have been written for all that is known."""


def written_bytes(namespace: Namespace, key: BlockKey) -> int:
    """What is written when a block is stored."""
    return record_bytes(namespace.payload_of(key)) + _ENTRIES * ENTRY_BYTES


class MeteredTier(SerializedTier):
    """Spends the allowance as slots are reserved: so what is under way never exceeds it."""

    namespace: Namespace

    def prepare_store(self, keys: Sequence[BlockKey], *, evict: bool = True) -> Reservation:
        reservation = super().prepare_store(keys, evict=evict)
        if self.allowance is not None and reservation.keys:
            self.allowance.spend(self._size_of(reservation.keys))
        return reservation

    def complete_store(
        self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, Outcome] | None = None
    ) -> None:
        if self.allowance is not None and failed:
            spared = [key for key, outcome in failed.items() if outcome not in _WRITTEN]
            self.allowance.spend(-self._size_of([key for key in spared if key in self._reserved]))
        super().complete_store(keys, failed)

    def _size_of(self, keys: Sequence[BlockKey]) -> int:
        return sum(written_bytes(self.namespace, key) for key in keys)
