"""How often blocks were used, written into the tables of own slabs now and then.

Statistics only: `ls` and `du` show them, `prewarm` and `snapshot` choose by them, and a restarted
tier knows what was used last. What a dead process had not written yet is lost, and does no harm.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

from kvtier.backends.nvme.spec import SLOT_BITS, SLOT_MASK
from kvtier.core.slab import layout
from kvtier.system.disk import Disk

_REQUESTS_MAX = 4096
"""So many requests are remembered between two writings."""
_SLOTS_MAX = 8192
"""At most so many entries are written at once, those that were used most: it takes some 50 ms of
a thread that shares its interpreter with the engine's scheduler."""


class Uses:
    """What a tier's requests have used since it was written down last.

    `note` and `carry` are for the tier's thread and `write` for the keeper's.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._noted: deque[Sequence[int]] = deque(maxlen=_REQUESTS_MAX)
        self._carried: deque[Mapping[int, tuple[int, int]]] = deque()
        self._clock = clock

    def note(self, places: Sequence[int]) -> None:
        """A request has used the blocks in these places (see NvmeSpec)."""
        self._noted.append(places)

    def carry(self, used: Mapping[int, tuple[int, int]]) -> None:
        """The blocks in these places were used so often elsewhere, and then at last."""
        self._carried.append(used)

    def write(self, disk: Disk, mine: Set[int], table_of: Callable[[int], Path]) -> None:
        """Write down what was noted of these slabs, the only ones that are ours to write to."""
        while self._carried:
            self._write(disk, mine, table_of, self._carried.popleft())
        counts: Counter[int] = Counter()
        while self._noted:
            counts.update(self._noted.popleft())
        now = int(self._clock())
        noted = {place: (count, now) for place, count in counts.most_common(_SLOTS_MAX)}
        self._write(disk, mine, table_of, noted)

    def _write(
        self,
        disk: Disk,
        mine: Set[int],
        table_of: Callable[[int], Path],
        used: Mapping[int, tuple[int, int]],
    ) -> None:
        slabs: dict[int, dict[int, tuple[int, int]]] = {}
        for place, counted in used.items():
            if place >> SLOT_BITS in mine:
                slabs.setdefault(place >> SLOT_BITS, {})[place & SLOT_MASK] = counted
        for slab_id, slots in slabs.items():
            self._write_slab(disk, table_of(slab_id), slots)

    def _write_slab(self, disk: Disk, table: Path, used: Mapping[int, tuple[int, int]]) -> None:
        fd = disk.open(table)
        try:
            slots = sorted(used)
            for start, stop in layout.runs(slots):
                entries = bytearray((stop - start) * layout.ENTRY_BYTES)
                at = layout.entry_at(slots[start])
                if disk.readv(fd, [memoryview(entries)], at) != len(entries):
                    return
                for slot in slots[start:stop]:
                    # Only these eight bytes: the rest of the entry is the handler's to write.
                    here = layout.entry_at(slot)
                    entry = memoryview(entries)[here - at :][: layout.ENTRY_BYTES]
                    text = layout.add_uses(entry, *used[slot])
                    disk.writev(fd, [memoryview(text)], here + layout.USES_AT)
        finally:
            disk.close(fd)
