"""What tells of a load's records whether they are the right ones, for a batch of them at once.

Asked record by record, this costs more in Python than a small record takes to be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.copier import DeviceLayout, Host
from kvtier.record.record import HEADER_BYTES, expected_headers, sum_at
from kvtier.slab import layout as table
from kvtier.types import BlockKey, Outcome

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]


class Parts(NamedTuple):
    """A rank's parts of some records, in place."""

    of_slots: Bytes
    """That of every slot, a row each."""
    slots: Ints

    def only(self, rows: Ints) -> Parts:
        """Some of these."""
        return Parts(self.of_slots, self.slots[rows])


class LoadProofs:
    """Looks at records in host memory for one rank."""

    def __init__(self, layout: DeviceLayout, host: Host, namespace: bytes) -> None:
        self._layout = layout
        self._host = host
        self._namespace = namespace
        self._slot_bytes = len(host.record(0))

    def look_at(self, slots: Sequence[int], keys: Sequence[BlockKey], group: int) -> Records:
        """The records of these keys, none of them pending; raises IndexError on a slot that is not
        there."""
        layout, places = self._layout, np.array(slots, np.int64)
        entries = self._host.entries_of(places)
        records = np.frombuffer(self._host.data[:], np.uint8).reshape(-1, self._slot_bytes)
        if places.min() < 0:
            raise IndexError("slots are numbered from 0")
        expected = expected_headers(keys, self._namespace, layout.group_bytes[group], layout.parts)
        wanted = np.frombuffer(expected, np.uint8).reshape(len(keys), -1)
        found = records[places, : wanted.shape[1]]
        sums = sum_at(layout.part)
        size = layout.part_bytes[group]
        first = HEADER_BYTES + layout.part * size
        there = _readable(entries) & table.are_of(entries, keys)
        return Records(
            host=self._host,
            parts=Parts(records[:, first : first + size], places),
            entries=entries,
            there=there,
            fit=there & (found == wanted).all(axis=1),
            stated=records[places, sums : sums + 8].view("<u8").ravel(),
        )


class Records(NamedTuple):
    """Records of a batch, as they were when they were first looked at."""

    host: Host
    parts: Parts
    entries: npt.NDArray[np.void]
    there: Flags
    """Which slots held the record that is asked for."""
    fit: Flags
    """Of which the header proves that, too."""
    stated: Sums
    """The checksums of this rank's parts that the headers state."""

    def outcomes(self, right: Flags, copied: Flags) -> list[Outcome]:
        """What became of them, now that those that are `right`, as their headers and checksums
        say, are `copied` or not."""
        entries = self.host.entries_of(self.parts.slots)
        if copied.all() and entries.tobytes() == self.entries.tobytes():
            return [Outcome.OK] * len(copied)  # nearly always, and soon
        same = _readable(entries) & table.are_same_blocks(entries, self.entries)
        outcomes = np.full(len(copied), Outcome.OK, object)
        outcomes[~right] = Outcome.CORRUPT
        outcomes[~same] = Outcome.GONE
        outcomes[right & ~copied] = Outcome.CANCELLED
        outcomes[~self.there] = Outcome.GONE
        outcomes[self.entries["state"] == table.FAILED] = Outcome.IO_ERROR
        found: list[Outcome] = outcomes.tolist()
        return found


def _readable(entries: npt.NDArray[np.void]) -> Flags:
    state = entries["state"]
    readable: Flags = (state == table.VALID) | (state == table.ARRIVED)
    return readable
