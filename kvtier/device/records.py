"""One rank's parts of records in host memory: where they lie, what verifies them and seals them.

A load's records are verified a batch at a time: asked record by record, this costs more in Python
than a small record takes to be copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.layout import Bytes, DeviceLayout, Ints
from kvtier.device.regroup import Regrouping
from kvtier.interfaces.handler import HostSlots
from kvtier.record.record import (
    ALIGN,
    HEADER_BYTES,
    Buffer,
    Header,
    expected_headers,
    header_of,
    padded,
    part_sum,
    put_sum,
    sum_at,
)
from kvtier.slab import layout as table
from kvtier.types import KEY_BYTES_MAX, BlockKey, Outcome

Flags = npt.NDArray[np.bool_]
Sums = npt.NDArray[np.uint64]


class RankRecords:
    """The records of a namespace in host memory, as one rank uses them."""

    def __init__(self, layout: DeviceLayout, host: HostSlots, namespace: bytes) -> None:
        self.layout = layout
        self._host = host
        self._namespace = namespace
        first = host.record(0)
        self._slot_bytes = len(first)
        self._first_at = int(np.frombuffer(first, np.uint8).ctypes.data)
        self._rooms = _Rooms()
        self._regroupings: dict[tuple[int, int], Regrouping | None] = {}
        """Of a group's records, by how many parts they have."""

    def part_addresses(self, slots: Sequence[int], group: int) -> Ints:
        """Where this rank's parts of the records in these slots lie."""
        first = self._first_at + self.layout.part_at(group)
        return first + self._slot_bytes * np.array(slots, np.int64)

    def part(self, slot: int, group: int) -> Buffer:
        """This rank's part of a record, in place."""
        at = self.layout.part_at(group)
        return self._host.record(slot)[at : at + self.layout.part_bytes[group]]

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
        sums, at = sum_at(layout.part), layout.part_at(group)
        there = _readable(entries) & table.are_of(entries, keys)
        found = FoundRecords(
            host=self._host,
            slots=places,
            parts=RecordParts(records[:, at : at + layout.part_bytes[group]], places),
            entries=entries,
            there=there,
            fit=there & (headers == wanted).all(axis=1),
            stated=records[places, sums : sums + 8].view("<u8").ravel(),
        )
        if layout.knows_heads and (others := there & ~found.fit).any():
            return self._with_others(found, keys, group, np.flatnonzero(others).tolist())
        return found

    def _with_others(
        self, found: FoundRecords, keys: Sequence[BlockKey], group: int, rows: list[int]
    ) -> FoundRecords:
        """With those of these rows that another number of ranks has written."""
        records = np.frombuffer(self._host.data[:], np.uint8).reshape(-1, self._slot_bytes)
        size = self.layout.group_bytes[group]
        rows_of: dict[int, list[int]] = {}
        for row in rows:
            head = memoryview(records[found.slots[row], :HEADER_BYTES].tobytes())
            header = header_of(head, keys[row], self._namespace)
            if header is not None and header.payload_bytes == size:
                rows_of.setdefault(header.parts, []).append(row)
        fit, others = found.fit.copy(), []
        for parts, of_parts in rows_of.items():
            if (regrouping := self._regrouping(group, parts)) is not None:
                slots, sources = found.slots[of_parts], regrouping.sources
                sums = slice(sum_at(sources.start), sum_at(sources.stop))
                stated = records[slots, sums].view("<u8")
                payloads = RecordParts(records[:, HEADER_BYTES : HEADER_BYTES + size], slots)
                others.append(OtherRecords(regrouping, np.array(of_parts), payloads, stated))
                fit[of_parts] = True
        return found._replace(fit=fit, others=others)

    def _regrouping(self, group: int, parts: int) -> Regrouping | None:
        at = group, parts
        if at not in self._regroupings:
            self._regroupings[at] = Regrouping.of(self.layout, group, parts)
        return self._regroupings[at]

    def regrouped(self, found: FoundRecords, group: int) -> FoundRecords:
        """All of these in memory of their own, as this rank would have written them, if another
        number of ranks wrote some; those whose bytes are not as their ranks say do not fit."""
        if not found.others:
            return found
        room = self._rooms.rows(len(found.slots), self.layout.part_bytes[group])
        fit, stated, own = found.fit.copy(), found.stated.copy(), found.own
        for row in np.flatnonzero(own):
            room[row] = found.parts.of_slots[found.slots[row]]
        for others in found.others:
            for at, row in enumerate(others.rows.tolist()):
                if others.verified(at):
                    others.regrouping.copy(others.payload(at), room[row])
                    stated[row] = part_sum(room[row].data)
                else:
                    fit[row] = False
        parts = RecordParts(room, np.arange(len(room)))
        return found._replace(parts=parts, fit=fit, stated=stated, others=())

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


class _Rooms(threading.local):
    """A thread's memory for what it regroups, until it looks for its next batch: memory that was
    never used before would take longer to get than the bytes take to be copied there."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    def rows(self, count: int, size: int) -> Bytes:
        """So many rows, each at an address that is a multiple of a page."""
        stride = padded(size)
        if len(self._room) < count * stride + ALIGN:
            self._room = np.empty(count * stride + ALIGN, np.uint8)
        aligned = self._room[-self._room.ctypes.data % ALIGN :][: count * stride]
        return aligned.reshape(count, stride)[:, :size]


class RecordParts(NamedTuple):
    """A rank's parts of some records, in their slots, or in memory where they were regrouped."""

    of_slots: Bytes
    """That of every slot there, a row each."""
    slots: Ints

    def only(self, rows: Ints) -> RecordParts:
        """Some of these."""
        return RecordParts(self.of_slots, self.slots[rows])

    @property
    def addresses(self) -> Ints:
        """Where they lie."""
        first: int = self.of_slots.__array_interface__["data"][0]
        return first + self.of_slots.strides[0] * self.slots


class OtherRecords(NamedTuple):
    """Records of a batch that another number of ranks has written."""

    regrouping: Regrouping
    rows: Ints
    """Which of the batch they are."""
    payloads: RecordParts
    """All parts of them."""
    stated: Sums
    """Of each record the checksums of the parts that hold heads of this rank's."""

    def payload(self, at: int) -> Bytes:
        """That of one of them."""
        payload: Bytes = self.payloads.of_slots[self.payloads.slots[at]]
        return payload

    def source(self, part: int) -> RecordParts:
        """One part of all of them."""
        size = self.regrouping.source_bytes
        of_slots = self.payloads.of_slots[:, part * size : (part + 1) * size]
        return RecordParts(of_slots, self.payloads.slots)

    def verified(self, at: int) -> bool:
        """Whether those parts of one of them have the checksums that its header states."""
        parts = [self.regrouping.source(self.payload(at), part) for part in self.regrouping.sources]
        stated: list[int] = self.stated[at].tolist()
        return [part_sum(part.data) for part in parts] == stated


class FoundRecords(NamedTuple):
    """Records of a batch, as they were when they were first looked at."""

    host: HostSlots
    slots: Ints
    parts: RecordParts
    entries: npt.NDArray[np.void]
    there: Flags
    """Which slots held the record that is asked for."""
    fit: Flags
    """Of which the header verifies that, too."""
    stated: Sums
    """The checksums of this rank's parts that the headers state."""
    others: Sequence[OtherRecords] = ()
    """Which of those that fit other numbers of ranks have written: what is said here of this rank's
    parts of them is nothing."""

    @property
    def own(self) -> Flags:
        """Which fit, and were written by as many ranks as there are here."""
        own = self.fit.copy()
        for others in self.others:
            own[others.rows] = False
        return own

    def verified(self) -> Flags:
        """Of which the part has the checksum that its header states, too; none are `others`."""
        right = self.fit.copy()
        for row in np.flatnonzero(right):
            found = part_sum(self.parts.of_slots[self.parts.slots[row]].data)
            right[row] = found == int(self.stated[row])
        return right

    def outcomes(self, right: Flags, copied: Flags, moved: bool = True) -> list[Outcome]:
        """What became of them, now that those that are `right`, as their headers and checksums
        say, are `copied` or not; IO_ERROR for those copied, unless the device has `moved` them."""
        entries = self.host.entries_of(self.slots)
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
