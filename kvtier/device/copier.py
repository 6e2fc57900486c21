"""What a copier is asked and answers, the engine's tensors in numbers, and which bytes go where."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import (
    HEADER_BYTES,
    Buffer,
    Header,
    check_part,
    put_sum,
    seal_part,
    stated_sum,
    verify_header,
)
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
        """Sleep until these jobs no longer touch device blocks; loads until their deadline. Not for
        ever: what a device that hangs still touches after that is DROPPED when it ends."""

    @abstractmethod
    def close(self) -> None:
        """End what runs, cancel the rest, release everything; what hangs is left as it is."""


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


# Which bytes go where: pure, vectorised planning of copies between device and records.

Ints = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """Device blocks of a job: per group `sizes[g]` block numbers, the first of which is block
    `starts[g]` of its request. Chunks are counted from the request's first block."""

    ids: Ints
    sizes: Sequence[int]
    starts: Sequence[int]


class Pieces(NamedTuple):
    """A job cut at chunk borders, one row a record, in the order of the job's keys.

    Row `i` is blocks `skip[i] : skip[i] + length[i]` of a chunk of group `group[i]`; their block
    numbers begin at `at[i]` in the job's ids.
    """

    group: Ints
    skip: Ints
    length: Ints
    at: Ints

    def __len__(self) -> int:
        return len(self.group)


class Copies(NamedTuple):
    """Contiguous copies, in the order of records; those of record `i` are
    `starts[i] : starts[i + 1]`. Addresses wrap like pointers do."""

    device: Ints
    host: Ints
    sizes: Ints
    starts: Ints


def cut(layout: DeviceLayout, blocks: Blocks) -> Pieces:
    """Cut a job into the pieces of its records; raises ValueError on blocks that cannot be."""
    ids, sizes, starts = blocks
    if len(sizes) != len(layout.groups) or len(starts) != len(sizes) or sum(sizes) != len(ids):
        raise ValueError("a job names blocks and a start for every group")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < layout.blocks:
        raise ValueError(f"block numbers lie between 0 and {layout.blocks - 1}")
    per_chunk = layout.blocks_per_chunk
    columns: list[Ints] = []
    at = 0
    for group, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        if not size:
            continue
        first = start % per_chunk
        edges = np.arange(-(-(first + size) // per_chunk) + 1, dtype=np.int64) * per_chunk - first
        low, high = np.maximum(edges[:-1], 0), np.minimum(edges[1:], size)
        columns.append(np.stack([np.full_like(low, group), low - edges[:-1], high - low, low + at]))
        at += size
    return Pieces(*np.concatenate(columns, axis=1)) if columns else Pieces(*_EMPTY)


def describe(layout: DeviceLayout, blocks: Blocks, pieces: Pieces, records: Ints) -> Copies:
    """The copies of pieces whose records lie at these addresses, neighbours merged."""
    columns = []
    for group in np.unique(pieces.group).tolist():
        rows = np.flatnonzero(pieces.group == group)
        length = pieces.length[rows]
        within = _ramp(length)
        ids = blocks.ids[np.repeat(pieces.at[rows], length) + within]
        place = np.repeat(pieces.skip[rows], length) + within
        owner = np.repeat(rows, length)
        refs = layout.groups[group]
        size = np.array([ref.page_bytes for ref in refs])[:, None]
        base = np.array([layout.tensors[ref.tensor].base for ref in refs])[:, None]
        stride = np.array([layout.tensors[ref.tensor].stride for ref in refs])[:, None]
        part = records[owner] + (HEADER_BYTES + layout.part * layout.part_bytes[group])
        device = base + stride * ids
        host = part + np.array(layout.ref_at[group])[:, None] + size * place
        every = np.broadcast_arrays(device, host, size, owner)
        columns.append([column.ravel() for column in every])
    if not columns:
        return Copies(_NONE, _NONE, _NONE, np.zeros(len(pieces) + 1, np.int64))
    device, host, size, owner = (np.concatenate(each) for each in zip(*columns, strict=True))
    return _merge(device, host, size, owner, len(pieces))


def _merge(device: Ints, host: Ints, sizes: Ints, owner: Ints, records: int) -> Copies:
    """Order copies by record, and join those that continue each other on both sides."""
    order = np.argsort(owner, kind="stable")
    device, host, sizes, owner = device[order], host[order], sizes[order], owner[order]
    apart = (
        (device[1:] != device[:-1] + sizes[:-1])
        | (host[1:] != host[:-1] + sizes[:-1])
        | (owner[1:] != owner[:-1])
    )
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    starts = np.searchsorted(owner[first], np.arange(records + 1))
    return Copies(device[first], host[first], np.add.reduceat(sizes, first), starts)


def _ramp(counts: Ints) -> Ints:
    """0..counts[0]-1, 0..counts[1]-1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - counts, counts)


_NONE = np.zeros(0, np.int64)
_EMPTY = np.zeros((4, 0), np.int64)


# An engine's KV tensors in plain numbers, and where their pages go in a record.
#
# A group's chunk is `blocks_per_chunk` consecutive blocks of it. One rank's part of a record
# holds, for every page reference of the group in order, that reference's pages of all the chunk's
# blocks: so what lies together on the device lies together in the record, and neighbouring blocks
# are one copy.


class DeviceTensor(msgspec.Struct, frozen=True):
    """Pages of one tensor: block `b` begins at `base + b * stride`."""

    base: int
    """An address, or an offset where a test has no addresses."""
    blocks: int
    stride: int
    page_bytes: int
    """A page with its padding; at most `stride`."""


class PageRef(msgspec.Struct, frozen=True):
    """What a group uses of each page of a tensor: its first `page_bytes` bytes."""

    tensor: int
    page_bytes: int


class DeviceLayout(msgspec.Struct, frozen=True, dict=True):
    """Tensors, cache groups and chunks of one rank.

    `parts` ranks write one part of each record each; this one writes part `part`.
    """

    tensors: tuple[DeviceTensor, ...]
    groups: tuple[tuple[PageRef, ...], ...]
    blocks_per_chunk: int = 1
    part: int = 0
    parts: int = 1
    group_ids: tuple[int, ...] = ()
    """The index that keys of each group carry; the group's position if none are given."""

    def __post_init__(self) -> None:
        if self.blocks_per_chunk < 1 or not 0 <= self.part < self.parts:
            raise ValueError("blocks_per_chunk is at least 1, and part one of parts")
        if not self.groups or not all(self.groups):
            raise ValueError("every group must use at least one page")
        if self.group_ids and len(self.group_ids) != len(self.groups):
            raise ValueError("group_ids names every group, or none")
        for tensor in self.tensors:
            if not 0 < tensor.page_bytes <= tensor.stride or tensor.blocks < 1:
                raise ValueError(f"pages overlap in {tensor}")
        for ref in (ref for group in self.groups for ref in group):
            if not 0 <= ref.tensor < len(self.tensors):
                raise ValueError(f"{ref} names no tensor")
            if not 0 < ref.page_bytes <= self.tensors[ref.tensor].page_bytes:
                raise ValueError(f"{ref} is larger than the page it uses")

    @classmethod
    def of_caches(
        cls,
        caches: Any,
        blocks_per_chunk: int,
        part: int = 0,
        parts: int = 1,
        group_ids: Sequence[int] = (),
    ) -> Self:
        """Describe canonical KV caches: anything with vLLM's `tensors` and `group_data_refs`."""
        tensors = []
        for entry in caches.tensors:
            tensor = entry.tensor
            size = tensor.element_size()
            stride = tensor.stride(0) * size
            tensors.append(
                DeviceTensor(tensor.data_ptr(), tensor.shape[0], stride, entry.page_size_bytes)
            )
        groups = tuple(
            tuple(PageRef(ref.tensor_idx, ref.page_size_bytes) for ref in group)
            for group in caches.group_data_refs
        )
        return cls(tuple(tensors), groups, blocks_per_chunk, part, parts, tuple(group_ids))

    @cached_property
    def key_groups(self) -> tuple[int, ...]:
        """The index that keys of each group carry."""
        return self.group_ids or tuple(range(len(self.groups)))

    @cached_property
    def blocks(self) -> int:
        """Block numbers are below this in every tensor."""
        return min(tensor.blocks for tensor in self.tensors)

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """The size of this rank's part of a record, by group."""
        return tuple(
            self.blocks_per_chunk * sum(ref.page_bytes for ref in group) for group in self.groups
        )

    @cached_property
    def ref_at(self) -> tuple[tuple[int, ...], ...]:
        """Where each reference's pages begin in the part, by group."""
        offsets = []
        for group in self.groups:
            at, starts = 0, []
            for ref in group:
                starts.append(at)
                at += self.blocks_per_chunk * ref.page_bytes
            offsets.append(tuple(starts))
        return tuple(offsets)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """The payload of a whole record by group: what the namespace has to state."""
        return tuple(size * self.parts for size in self.part_bytes)

    def widened(self, group_bytes: Sequence[int]) -> Self:
        """This layout with records as long as they are for a rank that holds more layers.

        The last reference of a group stands in it as often as that takes: its pages are copied out,
        and back, more than once. Where no number of them does, the layout stays another one.
        """
        groups = []
        for refs, stated in zip(self.groups, group_bytes, strict=True):
            page = stated // (self.parts * self.blocks_per_chunk)
            missing = page - sum(ref.page_bytes for ref in refs)
            groups.append(refs + refs[-1:] * max(0, missing // refs[-1].page_bytes))
        return msgspec.structs.replace(self, groups=tuple(groups))
