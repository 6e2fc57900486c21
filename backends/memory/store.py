"""The medium itself: aligned slots in anonymous memory, and who owns which."""

from __future__ import annotations

import mmap
from typing import ClassVar

from kvtier.core.records.record import Buffer, record_bytes
from kvtier.errors import MediumError
from kvtier.types import BlockKey, Namespace, Outcome, SlotSpec


class MemorySpec(SlotSpec, tag="memory"):
    """Slots of a `MemoryStore`."""

    medium: ClassVar[str] = "memory"


class MemoryStore:
    """Slots that the tier hands out and the handler fills."""

    def __init__(self, namespace: Namespace, capacity: int) -> None:
        self.slot_bytes = record_bytes(namespace.payload_bytes)
        self.slots = capacity // self.slot_bytes
        if self.slots == 0:
            raise MediumError(
                f"a memory tier of {capacity} bytes holds not one block of {self.slot_bytes}: "
                "raise its capacity"
            )
        try:
            self._region = mmap.mmap(
                -1, self.slots * self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise MediumError(
                f"no {self.slots * self.slot_bytes} bytes of memory ({error.strerror}): "
                "lower the memory tier's capacity"
            ) from error
        self._bytes = memoryview(self._region)
        self.owners: dict[int, BlockKey] = {}
        """Whose record a slot holds or is about to hold; written by the tier alone."""
        self.landed: dict[int, Outcome] = {}
        """How the transfer into a slot ended; forgotten when the slot changes hands."""

    def assign(self, slot: int, key: BlockKey) -> None:
        """The slot is this key's from now on; nothing has landed in it yet."""
        self.landed.pop(slot, None)
        self.owners[slot] = key

    def release(self, slot: int) -> None:
        """The slot is nobody's from now on."""
        self.landed.pop(slot, None)
        del self.owners[slot]

    def record(self, slot: int) -> Buffer:
        """The slot's bytes, in place."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"no slot {slot} in a memory tier of {self.slots}")
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
