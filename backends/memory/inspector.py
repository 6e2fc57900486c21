"""What is to be known from outside of memory that is one process's own: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvtier.backends.memory.settings import MemorySettings
from kvtier.core.inspection import Filling, Inspector, Reach
from kvtier.core.inspection.contents import Depth
from kvtier.core.inspection.filling import TAKE_ALL
from kvtier.core.settings import ByteSize, Capacity


class MemoryInspector(Inspector[MemorySettings]):
    """There is nothing to see, to mend or to remove, and that is no trouble."""

    reach = Reach.HOST

    def where(self) -> str:
        return "memory of each process"

    def _look(self, depth: Depth, uses_of: str | None) -> None:
        """It stays unseen."""

    @contextmanager
    def measuring_place(self, room: int) -> Iterator[MemorySettings]:
        """Memory that every process has anew."""
        if self.tier:
            yield msgspec.structs.replace(self.settings, **TAKE_ALL)
        else:
            yield msgspec.structs.replace(self.settings, capacity=Capacity(ByteSize(room)))

    def filling(self) -> Filling[MemorySettings]:
        return MemoryFilling(self.opener, self.settings, self.context, self.capacity())


class MemoryFilling(Filling[MemorySettings]):
    """Nothing of it would be left."""

    def keeps(self) -> bool:
        return False
