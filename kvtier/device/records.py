"""One rank's parts of records in host memory: where they lie, what verifies them and seals them.

A load's records are verified a batch at a time: asked record by record, this costs more in Python
than a small record takes to be copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.device.layout import DeviceLayout, Ints
from kvtier.record.record import (
    HEADER_BYTES,
    Buffer,
    Header,
    expected_headers,
    part_sum,
    put_sum,
    sum_at,
)
from kvtier.slab import layout as table
from kvtier.types import KEY_BYTES_MAX, BlockKey, Outcome

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Sums = npt.NDArray[np.uint64]


class Host(Protocol):
    """Host memory in numbered slots, each with an entry in a table."""

    data: Buffer
    """All slots, in place, one behind the other."""

    def record(self, slot: int) -> Buffer:
        """A slot's record, in place."""

    def state(self, slot: int) -> int:
        """The state byte of a slot's entry."""

    def entry(self, slot: int) -> bytes:
        """A slot's entry as it stands."""

    def entries_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """The entries of some slots as they stand."""


class RankRecords:
    """The records of a namespace in host memory, as one rank uses them."""

    def __init__(self, layout: DeviceLayout, host: Host, namespace: bytes) -> None:
        self.layout = layout
        self._host = host
        self._namespace = namespace
        first = host.record(0)
        self._slot_bytes = len(first)
        self._first_at = int(np.frombuffer(first, np.uint8).ctypes.data)

    def addresses(self, slots: Sequence[int]) -> Ints:
        """Where the records of these slots lie."""
        return self._first_at + self._slot_bytes * np.array(slots, np.int64)

    def part_addresses(self, slots: Sequence[int], group: int) -> Ints:
        """Where this rank's parts of them lie."""
        return self.addresses(slots) + self._part_at(group)

    def part(self, slot: int, group: int) -> Buffer:
        """This rank's part of a record, in place."""
        at = self._part_at(group)
        return self._host.record(slot)[at : at + self.layout.part_bytes[group]]

    def _part_at(self, group: int) -> int:
        return HEADER_BYTES + self.layout.part * self.layout.part_bytes[group]

    # -- loads -----------------------------------------------------------------------------

    def pending(self, slot: int) -> bool:
        """Whether a record is still on its way."""
        return self._host.state(slot) == table.RESERVED

    def find(self, slots: Sequence[int], keys: Sequence[BlockKey], group: int) -> FoundRecords:
        """The records of these keys, none of them pending; raises IndexError on a slot that is not
        there."""
        layout, places = self.layout, np.array(slots, np.int64)
        entries = self._host.entries_of(places)
        records = np.frombuffer(self._host.data[:], np.uint8).reshape(-1, self._slot_bytes)
        if places.min() < 0:
            raise IndexError("slots are numbered from 0")
        expected = expected_headers(keys, self._namespace, layout.group_bytes[group], layout.parts)
        wanted = np.frombuffer(expected, np.uint8).reshape(len(keys), -1)
        headers = records[places, : wanted.shape[1]]
        sums, at = sum_at(layout.part), self._part_at(group)
        there = _readable(entries) & table.are_of(entries, keys)
        return FoundRecords(
            host=self._host,
            parts=RecordParts(records[:, at : at + layout.part_bytes[group]], places),
            entries=entries,
            there=there,
            fit=there & (headers == wanted).all(axis=1),
            stated=records[places, sums : sums + 8].view("<u8").ravel(),
        )

    # -- stores ----------------------------------------------------------------------------

    def reserved(self, slot: int, key: BlockKey) -> Outcome:
        """OK if a slot waits for this key's bytes."""
        entry = self._host.entry(slot)
        at = table.ENTRY_BYTES - KEY_BYTES_MAX
        waits = entry[0] == table.RESERVED and entry[at : at + entry[1]] == key
        return Outcome.OK if waits else Outcome.GONE

    def seal(self, slot: int, key: BlockKey, group: int, checksum: int | None = None) -> Outcome:
        """Write the checksum of this rank's part, which somebody may have taken already; the first
        rank writes the header, too. OK if the slot waited for the record before and after."""
        if not (outcome := self.reserved(slot, key)).ok:
            return outcome
        record, layout = self._host.record(slot), self.layout
        if layout.part == 0:
            size = layout.group_bytes[group]
            Header(key, self._namespace, size, layout.parts).write(record)
        if checksum is None:
            checksum = part_sum(self.part(slot, group))
        put_sum(record, layout.part, checksum)
        return self.reserved(slot, key)


class RecordParts(NamedTuple):
    """A rank's parts of some records, in place."""

    of_slots: Bytes
    """That of every slot, a row each."""
    slots: Ints

    def only(self, rows: Ints) -> RecordParts:
        """Some of these."""
        return RecordParts(self.of_slots, self.slots[rows])


class FoundRecords(NamedTuple):
    """Records of a batch, as they were when they were first looked at."""

    host: Host
    parts: RecordParts
    entries: npt.NDArray[np.void]
    there: Flags
    """Which slots held the record that is asked for."""
    fit: Flags
    """Of which the header verifies that, too."""
    stated: Sums
    """The checksums of this rank's parts that the headers state."""

    def verified(self) -> Flags:
        """Of which the part has the checksum that its header states, too."""
        right = self.fit.copy()
        for row in np.flatnonzero(right):
            found = part_sum(self.parts.of_slots[self.parts.slots[row]].data)
            right[row] = found == int(self.stated[row])
        return right

    def outcomes(self, right: Flags, copied: Flags, moved: bool = True) -> list[Outcome]:
        """What became of them, now that those that are `right`, as their headers and checksums
        say, are `copied` or not; IO_ERROR for those copied, unless the device has `moved` them."""
        entries = self.host.entries_of(self.parts.slots)
        if moved and copied.all() and entries.tobytes() == self.entries.tobytes():
            return [Outcome.OK] * len(copied)  # nearly always, and soon
        same = _readable(entries) & table.are_same_blocks(entries, self.entries)
        outcomes = np.full(len(copied), Outcome.OK if moved else Outcome.IO_ERROR, object)
        outcomes[~right] = Outcome.CORRUPT
        outcomes[~same] = Outcome.GONE
        outcomes[right & ~copied] = Outcome.CANCELLED
        outcomes[~self.there] = Outcome.GONE
        outcomes[self.entries["state"] == table.FAILED] = Outcome.IO_ERROR
        found: list[Outcome] = outcomes.tolist()
        return found


def up_to_wrong(right: Flags, failed: bool) -> Flags:
    """Which records of a load are copied: those before the first that is not right, and none of a
    load that has failed."""
    copied: Flags = np.logical_and.accumulate(right) & (not failed)
    return copied


def _readable(entries: npt.NDArray[np.void]) -> Flags:
    state = entries["state"]
    readable: Flags = (state == table.VALID) | (state == table.ARRIVED)
    return readable
