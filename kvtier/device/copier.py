"""What a device copier is asked and answers, and the proofs that its bytes are the right ones."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.core.interfaces.mover import TransferKind
from kvtier.core.records.record import (
    HEADER_BYTES,
    Buffer,
    Header,
    check_part,
    put_sum,
    seal_part,
    stated_sum,
    verify_header,
)
from kvtier.device.copy_plan import Blocks
from kvtier.device.layout import DeviceLayout
from kvtier.slab import layout as table
from kvtier.types import KEY_BYTES_MAX, BlockKey, FilePlace, Outcome


class Host(Protocol):
    """Host memory in numbered slots, each with an entry in a table: a CPU region is one."""

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


class Job(msgspec.Struct, kw_only=True):
    """Records to move between the device and host memory.

    Key `i` is the record in `slots[i]`, of the group at position `groups` of the layout that the
    blocks say. A load may name slots whose records are still arriving; `deadline` is a point of
    `time.monotonic()` at which those that have not arrived are given up. Keys whose positions are
    in `files` have no slot: they are read from there straight into the device.
    """

    id: int
    kind: TransferKind
    keys: Sequence[BlockKey]
    slots: Sequence[int]
    blocks: Blocks
    deadline: float
    files: Mapping[int, FilePlace] = msgspec.field(default_factory=dict)


class JobResult(msgspec.Struct, kw_only=True):
    """How a job ended, one outcome a key. After it, nothing touches the job's blocks or slots.

    One record that fails fails a load: what had not been copied by then is CANCELLED, unless it has
    arrived and is bad, too. If its bytes were wrong, others are waited for a little, to find out.
    """

    id: int
    kind: TransferKind
    outcomes: list[Outcome]
    bytes_moved: int
    seconds: float
    """From submission to the end."""
    busy_seconds: float
    """The part of it in which bytes moved: what the cost model wants to know of the device link."""
    bytes_read: int = 0
    """The part of `bytes_moved` that came straight from files, which `busy_seconds` leaves out."""
    read_seconds: float = 0.0
    """How long that took."""

    @property
    def ok(self) -> bool:
        """Whether every record made it."""
        return all(outcome.ok for outcome in self.outcomes)


class Busy:
    """How long something has gone on; what overlaps counts once, and what only waits does not."""

    def __init__(self) -> None:
        self.running = 0
        self.seconds = 0.0
        self._since = 0.0
        self._waiting = 0
        self._lock = threading.Lock()

    def begin(self, rows: int, now: float) -> None:
        with self._lock:
            self._moves(now)
            self.running += rows

    def end(self, rows: int, now: float) -> None:
        with self._lock:
            self._moves(now)
            self.running -= rows

    @contextmanager
    def waiting(self, rows: int, clock: Callable[[], float]) -> Iterator[None]:
        """So many of those that run wait meanwhile: for a buffer, or for the engine. The link could
        do other work, so this says nothing of how fast it is."""
        self._wait(rows, clock())
        try:
            yield
        finally:
            self._wait(-rows, clock())

    def _wait(self, rows: int, now: float) -> None:
        with self._lock:
            self._moves(now)
            self._waiting += rows

    def _moves(self, now: float) -> None:
        """Count the time up to now, if something has moved."""
        if self.running > self._waiting:
            self.seconds += now - self._since
        self._since = now


class DeviceCopier(ABC):
    """Moves records between device and host memory, in its own threads; loads before stores.

    `submit` returns at once. Loads copy each record as it arrives, verified; a store is complete
    when every record is sealed. Only bytes whose entry, header and checksum prove them reach the
    device as OK; a load that fails may leave others in the blocks that it was to fill.
    """

    reads_files: bool = False
    """Whether jobs may name files now."""
    pinned: bool = True
    """Whether host memory is pinned for the device by now, as far as that is to be had."""

    @abstractmethod
    def submit(self, job: Job, mark: object = None) -> None:
        """Queue a job, ordered after what the engine has given its device to do so far, or had
        when `mark` was taken."""

    def mark(self) -> object:
        """How far the engine has come in what it gives its device to do."""
        return None

    def make_ready(self, seconds: float) -> bool:
        """Wait until copies are as fast as an engine's start should wait for, but no longer than
        this; whether they are."""
        return True

    @abstractmethod
    def poll(self) -> list[JobResult]:
        """Jobs that ended since the last call; never blocks."""

    @abstractmethod
    def give_up(self, id: int) -> None:
        """Wait no longer for those records of a load that have not arrived: they are CANCELLED;
        and of a store copy no more than what is under way: the rest is DROPPED."""

    @abstractmethod
    def wait(self, ids: Collection[int]) -> None:
        """Sleep until these jobs no longer touch device blocks; loads until their deadline."""

    @abstractmethod
    def close(self) -> None:
        """End what runs, cancel the rest, release everything."""


def header_fits(
    layout: DeviceLayout, namespace: bytes, record: Buffer, key: BlockKey, group: int
) -> bool:
    """Whether a record's header proves this key, of this namespace, in this layout's geometry."""
    return verify_header(record, key, namespace, layout.group_bytes[group], layout.parts).ok


class Prover:
    """Checks and makes the proofs of one rank's parts in host memory."""

    def __init__(self, layout: DeviceLayout, host: Host, namespace: bytes) -> None:
        self._layout = layout
        self._host = host
        self._namespace = namespace

    def part(self, slot: int, group: int) -> Buffer:
        """This rank's part of a record, in place."""
        size = self._layout.part_bytes[group]
        at = HEADER_BYTES + self._layout.part * size
        return self._host.record(slot)[at : at + size]

    def pending(self, slot: int) -> bool:
        """Whether a record is still on its way."""
        return self._host.state(slot) == table.RESERVED

    def arrived(self, slot: int, key: BlockKey) -> Outcome:
        """OK if a record that is not pending may be loaded; otherwise why not."""
        entry = self._host.entry(slot)
        if entry[0] in (table.VALID, table.ARRIVED) and _key(entry) == key:
            return Outcome.OK
        return Outcome.IO_ERROR if entry[0] == table.FAILED else Outcome.GONE

    def stamp(self, slot: int) -> bytes:
        """What must not change while a record is copied."""
        return table.block_stamp(self._host.entry(slot))

    def unchanged(self, slot: int, stamp: bytes) -> bool:
        """Whether the slot still holds the same record, now that it has been copied."""
        entry = self._host.entry(slot)
        return table.block_stamp(entry) == stamp and entry[0] in (table.VALID, table.ARRIVED)

    def verify(self, slot: int, key: BlockKey, group: int) -> Outcome:
        """Prove header and this rank's part, where they lie."""
        outcome = self.header(slot, key, group)
        if not outcome.ok:
            return outcome
        record = self._host.record(slot)
        proved = check_part(record, self._layout.part, self.part(slot, group))
        return Outcome.OK if proved else Outcome.CORRUPT

    def header(self, slot: int, key: BlockKey, group: int) -> Outcome:
        """Prove the header alone."""
        fits = header_fits(self._layout, self._namespace, self._host.record(slot), key, group)
        return Outcome.OK if fits else Outcome.CORRUPT

    def stated(self, slot: int) -> int:
        """The checksum that the header states for this rank's part."""
        return stated_sum(self._host.record(slot), self._layout.part)

    def reserved(self, slot: int, key: BlockKey) -> Outcome:
        """OK if a slot waits for this key's bytes."""
        entry = self._host.entry(slot)
        waits = entry[0] == table.RESERVED and _key(entry) == key
        return Outcome.OK if waits else Outcome.GONE

    def complete(
        self, slot: int, key: BlockKey, group: int, checksum: int | None = None
    ) -> Outcome:
        """Make the proof of this rank's part, whose checksum somebody may have taken already; the
        first rank writes the header, too. OK if the slot waited for the record before and after."""
        if not (outcome := self.reserved(slot, key)).ok:
            return outcome
        record, layout = self._host.record(slot), self._layout
        if layout.part == 0:
            size = layout.group_bytes[group]
            Header(key, self._namespace, size, layout.parts).write(record)
        if checksum is None:
            seal_part(record, layout.part, self.part(slot, group))
        else:
            put_sum(record, layout.part, checksum)
        return self.reserved(slot, key)


def _key(entry: bytes) -> bytes:
    at = table.ENTRY_BYTES - KEY_BYTES_MAX
    return entry[at : at + entry[1]]
