"""What the processes of one engine map: its mark, which says at which numbers its slabs are, and
the slabs themselves.

The mark is the file in `owners/` whose lock keeps the engine's slabs from being adopted. The tier
writes there which slab has which numbers; workers and mover map what they find there. They hold the
mark, too: so the slabs of a dead engine are adopted when the last of its processes has gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.backends.cpu.memory import Arena, map_pages
from kvtier.errors import FormatError, MediumError
from kvtier.interfaces.handler import RegionHandler, own_spec
from kvtier.record.record import Buffer
from kvtier.slab import layout
from kvtier.slab.files import (
    DATA_SUFFIX,
    SAID_BYTES,
    TABLE_SUFFIX,
    held,
    hold_owner,
    let_go,
    owner_path,
    read_part,
)
from kvtier.slab.layout import (
    PIECES_MAX,
    SLOT_BITS,
    SLOT_MASK,
    SlabHeader,
    piece_slots,
    pieces_in,
    pinning_order,
)
from kvtier.types import BlockKey, LoadStoreSpec, Outcome, SlotSpec

OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
"""All users share /dev/shm, and may lay a link there that leads anywhere."""
_CHANGES_S, _LOOK_S = 1.0, 0.0002
"""An owner changes its mark within microseconds, unless others have the processor."""

_NAME_AT = SAID_BYTES
_WORD_AT = 32
_DIGEST_BYTES = 16
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = 48
_MOVED = struct.Struct("<I")
_MOVED_AT = 56
_GEOMETRY = struct.Struct("<QII16s")
_GEOMETRY_AT = 64
_USED = struct.Struct("<Q")
_USED_AT = 96
_TEXT_AT, _TEXT_BYTES = 128, 128
_ROWS_AT = 4096
ROWS_MAX = 4096
_RANKS_MAX = 12
_ROW = struct.Struct("<IIII")
_PINNED = struct.Struct("<I")
_PINNED_AT = _ROW.size
ROW_BYTES = _PINNED_AT + _RANKS_MAX * _PINNED.size
_SAID = 1 << PIECES_MAX
"""Says that a rank pins, before any piece is."""
_PIECES = _SAID - 1


class CpuSpec(SlotSpec, tag="cpu"):
    """Numbers of slots, as the engine's tier has given them to its slabs."""

    medium: ClassVar[str] = "cpu"


class Row(NamedTuple):
    """Where one slab is."""

    slab_id: int
    base: int
    slots: int
    mine: int


class Geometry(NamedTuple):
    """How many numbers an engine has for slots, of which size, for how many slabs."""

    slots: int
    slot_bytes: int
    rows: int
    namespace: bytes


_FIRST_USE = 1 << 63
"""Stands at the first of those that a request uses."""
_PLACE_MASK = _FIRST_USE - 1
USES_MAX = 1 << 12
"""So many uses of neighbours' blocks are told of, until they are told of others."""


def _uses_at(rows: int) -> int:
    return _ROWS_AT + rows * ROW_BYTES


def _mark_bytes(rows: int) -> int:
    return _uses_at(rows) + USES_MAX * _USED.size


class Mark:
    """An engine's mark, mapped. Its tier writes which slab is where, and its ranks what they have
    pinned; nothing depends on the latter: who believes what a dead process has said copies more
    slowly, no more."""

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        page = os.pread(fd, _ROWS_AT, 0).ljust(_ROWS_AT, b"\0")
        self.slots, self.slot_bytes, self.count, self.namespace = _GEOMETRY.unpack_from(
            page, _GEOMETRY_AT
        )
        if not (self.slots and self.slot_bytes and size >= _mark_bytes(self.count)):
            raise FormatError("the engine's mark is cut short")
        self._map = mmap.mmap(fd, size)

    @staticmethod
    def begin(fd: int, engine: str, geometry: Geometry) -> None:
        """For a new owner, whose mark this is."""
        os.ftruncate(fd, _mark_bytes(geometry.rows))
        os.pwrite(fd, digest(engine), _NAME_AT)
        os.pwrite(fd, engine.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), _TEXT_AT)
        os.pwrite(fd, _GEOMETRY.pack(*geometry), _GEOMETRY_AT)

    @property
    def generation(self) -> int:
        """Another one after each change; odd while something changes."""
        (found,) = _GENERATION.unpack_from(self._map, _GENERATION_AT)
        return int(found)

    def rows(self) -> tuple[int, dict[int, Row]]:
        """The slabs by their places in the mark, and the generation; -1 if they are changing."""
        before = self.generation
        words = np.frombuffer(self._map, "<u4", self.count * ROW_BYTES // 4, _ROWS_AT)
        table = words.reshape(self.count, -1)[:, :4].copy()
        del words
        if before % 2 or before != self.generation:
            return -1, {}
        rows = np.flatnonzero(table[:, 2])
        return before, {int(at): Row(*table[at].tolist()) for at in rows}

    def write(self, at: int, row: Row | None) -> None:
        """For the owner: a slab has numbers now, or (None) none any more."""
        generation = self.generation
        _GENERATION.pack_into(self._map, _GENERATION_AT, generation + 1)
        begin = _ROWS_AT + at * ROW_BYTES
        pinned = self._map[begin + _PINNED_AT : begin + ROW_BYTES]
        if row is None or _ROW.unpack_from(self._map, begin)[:3] != row[:3]:
            pinned = bytes(len(pinned))
        self._map[begin : begin + ROW_BYTES] = _ROW.pack(*(row or (0, 0, 0, 0))) + pinned
        _GENERATION.pack_into(self._map, _GENERATION_AT, generation + 2)

    @property
    def moved_to(self) -> int:
        """The owner whose mark takes the place of this one, if it was removed."""
        (found,) = _MOVED.unpack_from(self._map, _MOVED_AT)
        return int(found)

    def move_to(self, owner: int) -> None:
        """For the owner: another mark says from now on what is where."""
        _MOVED.pack_into(self._map, _MOVED_AT, owner)
        self.write(0, None)

    @property
    def word(self) -> bytes:
        """What the engine's workers call it."""
        return bytes(self._map[_WORD_AT : _WORD_AT + _DIGEST_BYTES])

    @word.setter
    def word(self, said: bytes) -> None:
        self._map[_WORD_AT : _WORD_AT + _DIGEST_BYTES] = said

    def tell_used(self, places: Sequence[tuple[int, int]]) -> None:
        """For the owner: a request of it has used these slots of neighbours' slabs."""
        (count,) = _USED.unpack_from(self._map, _USED_AT)
        first = _FIRST_USE
        for slab_id, slot in places:
            at = _uses_at(self.count) + count % USES_MAX * _USED.size
            _USED.pack_into(self._map, at, first | slab_id << SLOT_BITS | slot)
            count, first = count + 1, 0
        _USED.pack_into(self._map, _USED_AT, count)

    def note_pinned(self, at: int, rank: int, piece: int) -> None:
        """For a rank: one more piece of a slab (a bit) is pinned for its device; 0: it begins."""
        if rank < _RANKS_MAX:
            where = _ROWS_AT + at * ROW_BYTES + _PINNED_AT + rank * _PINNED.size
            (before,) = _PINNED.unpack_from(self._map, where) if piece else (0,)
            _PINNED.pack_into(self._map, where, before | piece | _SAID)

    def pinned(self, at: int) -> int:
        """Which pieces of a slab are pinned for all ranks."""
        begin = _ROWS_AT + at * ROW_BYTES + _PINNED_AT
        pieces = 0
        for rank in range(_RANKS_MAX):
            (said,) = _PINNED.unpack_from(self._map, begin + rank * _PINNED.size)
            if not said:
                break
            pieces = said if rank == 0 else pieces & said
        return pieces & _PIECES

    def close(self) -> None:
        self._map.close()


def digest(word: str) -> bytes:
    """What stands in a mark for a word."""
    return hashlib.blake2b(word.encode(), digest_size=_DIGEST_BYTES).digest()


def marks_of(marks: Sequence[Path], word: str, *, at: int = _WORD_AT) -> list[Path]:
    """Those of living engines that have this word."""
    wanted = digest(word)
    return [mark for mark in marks if _read(mark, at, _DIGEST_BYTES) == wanted and held(mark)]


def marks_named(marks: Sequence[Path], engine: str) -> list[Path]:
    """Those of living engines with this name."""
    return marks_of(marks, engine, at=_NAME_AT)


def uses_told(mark: Path, heard: int | None) -> tuple[int, list[list[tuple[int, int]]]]:
    """What an engine has used of its neighbours since so many uses were heard of: how many there
    are now, and, by request, slabs and slots; none at first, and not what was lost since, because
    they were too many."""
    (count,) = _USED.unpack(_read(mark, _USED_AT, _USED.size).ljust(_USED.size, b"\0"))
    geometry = _read(mark, _GEOMETRY_AT, _GEOMETRY.size)
    if heard is None or count <= heard or len(geometry) < _GEOMETRY.size:
        return count, []
    rows = _GEOMETRY.unpack(geometry)[2]
    words = np.frombuffer(_read(mark, _uses_at(rows), USES_MAX * _USED.size), "<u8")
    new = np.arange(max(heard, count - USES_MAX), count) % USES_MAX
    if len(words) < USES_MAX:
        return count, []
    requests: list[list[tuple[int, int]]] = []
    for word in words[new].tolist():
        if word & _FIRST_USE or not requests:
            requests.append([])
        place = word & _PLACE_MASK
        requests[-1].append((place >> SLOT_BITS, place & SLOT_MASK))
    return count, requests


def engine_of(mark: Path) -> str:
    """The name of the engine that a mark is of."""
    return _read(mark, _TEXT_AT, _TEXT_BYTES).rstrip(b"\0").decode(errors="replace")


def _read(mark: Path, at: int, size: int) -> bytes:
    with contextlib.suppress(OSError):
        return read_part(mark, at, size)
    return b""


class Region:
    """An engine's slabs, mapped. `data` and `table` are one array of slots and one of entries."""

    def __init__(self, path: Path, fd: int, *, owns: bool = False) -> None:
        """Of an open mark, which `close` lets go of unless its owner does."""
        self._owns = owns
        self.path = path
        self._home = path.parent.parent
        self._fd = fd
        self.mark = Mark(fd)
        self._arena = Arena(self.mark.slots, self.mark.slot_bytes, self.mark.count)
        self.data, self.table = self._arena.data, self._arena.table
        self.slot_bytes = self.mark.slot_bytes
        self._rows: dict[int, Row] = {}
        self._at: dict[int, int] = {}
        """By slab, its place in the mark."""
        self._generation = 0
        self._there = bytearray(self.mark.slots)
        """By slot, whether it has memory here."""
        self._order: list[range] = []
        self._changing = threading.Lock()
        self._when_mapped: Callable[[Sequence[range]], None] = lambda pieces: None
        self._when_unmapped: Callable[[range], None] = lambda slots: None

    @classmethod
    def attach(cls, path: Path) -> Region:
        """Map what an owner has made; raises MediumError or FormatError."""
        try:
            fd = hold_owner(path.parent, int(path.name, 16))
        except OSError as error:
            raise MediumError(
                f"cannot open the CPU memory {path} ({error.strerror}): its engine makes it first"
            ) from error
        try:
            region = cls(path, fd)
        except (FormatError, OSError, ValueError):
            os.close(fd)
            raise
        region.refresh()
        return region

    @property
    def namespace(self) -> bytes:
        """The digest of the namespace whose blocks it holds."""
        return bytes(self.mark.namespace)

    def entries(self) -> npt.NDArray[np.void]:
        """All entries, in place."""
        return self._arena.entries()

    # -- what is mapped --------------------------------------------------------------------

    def refresh(self, slots: Sequence[int] = ()) -> None:
        """Map what the owner has made, taken over or found since the last call, and let go of what
        is there no more. What cannot be mapped reads as if nothing were there, and cannot be
        written to. Raises MediumError if one of these slots is of that."""
        if self.mark.generation != self._generation:
            # Whoever finds it changed waits until another thread has mapped what is new.
            with self._changing, contextlib.suppress(OSError):
                self._follow()
                self._remap()
        there, count = self._there, len(self._there)
        for slot in slots:
            if not (0 <= slot < count and there[slot]):
                raise MediumError(f"slot {slot} of {self.path} has no memory in this process")

    def _follow(self) -> None:
        """The mark was removed, and another takes its place. What was mapped stays so, because
        somebody may be copying there, until the owner gives its numbers to others."""
        while owner := self.mark.moved_to:
            fd = hold_owner(self.path.parent, owner)
            self.rebind(owner_path(self.path.parent, owner), fd)

    def rebind(self, path: Path, fd: int) -> None:
        """Another mark says what is where."""
        word = self.mark.word
        self.mark.close()
        if not self._owns:
            os.close(self._fd)
        self.path, self._fd, self.mark = path, fd, Mark(fd)
        self.mark.word = word
        self._rows, self._at, self._generation = {}, {}, 0

    def _remap(self) -> None:
        until = time.monotonic() + _CHANGES_S
        while (found := self.mark.rows())[0] < 0:
            if time.monotonic() > until:  # its owner is dying: the next call finds it changed, too
                return
            time.sleep(_LOOK_S)
        generation, rows = found
        if generation == self._generation:
            return
        for at, row in list(self._rows.items()):
            if rows.get(at, row)[:3] != row[:3] or at not in rows:
                self._unmap(at)
        theirs: list[Buffer] = []
        for at, row in rows.items():
            with contextlib.suppress(FormatError, OSError):
                if at not in self._rows:
                    self._map(at, row)
                    if self._order and row.mine:
                        self._when_mapped(pieces_in(row.base, row.slots, self.slot_bytes))
                    elif not row.mine:
                        first, end = row.base * self.slot_bytes, (row.base + row.slots)
                        theirs.append(self.data[first : end * self.slot_bytes])
                elif self._rows[at].mine != row.mine:
                    self._protect(at, row)
        self._generation = generation  # last: who finds it unchanged does not wait
        if theirs:
            threading.Thread(target=map_pages, args=(theirs,), daemon=True).start()

    def put(self, at: int, row: Row) -> None:
        """For the owner: map a slab, or one that has changed hands anew, and have the engine's
        other processes do so; raises FormatError or OSError."""
        known = self._rows.get(at)
        if known is not None and known[:3] == row[:3]:
            self._protect(at, row)
        else:
            if known is not None:
                self._unmap(at)
            self._map(at, row)
        self.mark.write(at, row)

    def drop(self, at: int) -> None:
        """For the owner: a slab has no numbers any more."""
        self.mark.write(at, None)
        if at in self._rows:
            self._unmap(at)

    def _map(self, at: int, row: Row) -> None:
        stem = self._home / f"{row.slab_id:08x}"
        data = os.open(stem.with_suffix(DATA_SUFFIX), OPEN_FLAGS)
        try:
            table = os.open(stem.with_suffix(TABLE_SUFFIX), OPEN_FLAGS)
            try:
                header = SlabHeader.unpack(os.pread(table, layout.TABLE_AT, 0))
                whole = (
                    os.fstat(data).st_size >= header.data_end
                    and os.fstat(table).st_size >= header.table_bytes
                )
                fits = (header.slots, header.slot_bytes) == (row.slots, self.slot_bytes)
                if not (whole and fits and row.base + row.slots <= self.mark.slots):
                    raise FormatError(f"{stem} is not the slab that it should be")
                self._arena.map(row.base, header, (data, table), at, writable=bool(row.mine))
            finally:
                os.close(table)
        finally:
            os.close(data)
        self._rows[at] = row
        self._at[row.slab_id] = at
        self._there[row.base : row.base + row.slots] = b"\1" * row.slots

    def _protect(self, at: int, row: Row) -> None:
        self._arena.protect(row.base, row.slots, at, writable=bool(row.mine))
        self._rows[at] = row

    def _unmap(self, at: int) -> None:
        row = self._rows.pop(at)
        self._at.pop(row.slab_id, None)
        self._there[row.base : row.base + row.slots] = bytes(row.slots)
        self._when_unmapped(range(row.base, row.base + row.slots))
        self._arena.unmap(row.base, row.slots, at)

    def changes(self, slab_id: int) -> int | None:
        """A number that changes with a slab's entries, and with its owner; None if it is not
        mapped."""
        at = self._at.get(slab_id)
        if at is None:
            return None
        return layout.changes_in(self._arena.heads[at * layout.TABLE_AT :][: layout.TABLE_AT])

    def last_used(self, slab_id: int) -> float | None:
        """When a block of a slab was stored or used last; None if it is not mapped."""
        if (at := self._at.get(slab_id)) is None:
            return None
        row = self._rows[at]
        entries = self._arena.entries()[row.base : row.base + row.slots]
        return float(layout.last_used(entries[layout.committed(entries)]).max(initial=0.0))

    def note_change(self, at: int) -> None:
        """For the owner: entries of this slab have changed."""
        where = at * layout.TABLE_AT + layout.CHANGES_AT
        (count,) = layout.CHANGES.unpack_from(self._arena.heads, where)
        layout.CHANGES.pack_into(self._arena.heads, where, (count + 1) % (1 << 63))

    # -- slots -----------------------------------------------------------------------------

    def record(self, slot: int) -> Buffer:
        """A slot's record, in place."""
        at = slot * self.slot_bytes
        return self.data[at : at + self.slot_bytes]

    def state(self, slot: int) -> int:
        """The state byte of a slot's entry."""
        return self.table[layout.entry_at(slot)]

    def entry(self, slot: int) -> bytes:
        """A slot's entry as it stands: who copies a record compares it before and after."""
        at = layout.entry_at(slot)
        return bytes(self.table[at : at + layout.ENTRY_BYTES])

    def entries_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        """The entries of some slots as they stand."""
        found: npt.NDArray[np.void] = self._arena.entries()[slots]
        return found

    # -- pinning ---------------------------------------------------------------------------

    def pinning_order(self) -> list[range]:
        """The own slots in pieces, in the order in which a device pins them."""
        entries = self._arena.entries()
        own = [row for row in self._rows.values() if row.mine]
        pieces = [piece for row in own for piece in pieces_in(row.base, row.slots, self.slot_bytes)]
        self._order = pinning_order(entries, pieces)
        return self._order

    def note_pinned(self, rank: int, piece: range | None) -> None:
        """For a rank: a piece is pinned for its device; None: it begins to pin."""
        step = piece_slots(self.slot_bytes)
        for at, row in list(self._rows.items()):
            if piece is None or row.base <= piece.start < row.base + row.slots:
                bit = 0 if piece is None else 1 << (piece.start - row.base) // step
                self.mark.note_pinned(at, rank, bit)

    def watch(
        self, mapped: Callable[[Sequence[range]], None], unmapped: Callable[[range], None]
    ) -> None:
        """Be told of pieces that are mapped from now on, and, before that, of slots that are
        unmapped."""
        self._when_mapped, self._when_unmapped = mapped, unmapped

    def name_engine(self, word: str) -> None:
        """For its owner: whose it is, in a word that the engine's workers know, too."""
        self.mark.word = digest(word)

    def close(self) -> None:
        """Unmap; whoever still holds a view of a record keeps the mapping alive until it drops."""
        self._arena.close()
        self.mark.close()
        if not self._owns and self._fd >= 0:
            let_go(self.path.parent, int(self.path.name, 16), self._fd)
        self._fd = -1


class CpuHandler(RegionHandler):
    """Records in place, for the mover and for whoever copies in the scheduler's process."""

    def __init__(self, region: Region, then: Callable[[], None] = lambda: None) -> None:
        """Closes the region, and does what is to be done `then`."""
        self.region: Region = region
        self._then = then

    def _slots(self, spec: LoadStoreSpec) -> list[int]:
        slots = own_spec(spec, CpuSpec).slots
        self.region.refresh(slots)
        return slots

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        return [self.region.record(slot) for slot in self._slots(spec)]

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        slot = own_spec(spec, CpuSpec).slots[index]
        self.region.refresh((slot,))
        if self.region.state(slot) == layout.RESERVED:
            state = layout.ARRIVED if outcome.ok else layout.FAILED
            self.region.table[layout.entry_at(slot)] = state

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, buffer in zip(self._slots(spec), keys, into, strict=True):
            before = self.region.entry(slot)
            record = self.region.record(slot)
            buffer[: len(record)] = record
            mine = before[0] == layout.VALID and layout.key_in(before) == key
            kept = layout.same_block(self.region.entry(slot), before)
            outcomes.append(Outcome.OK if mine and kept else Outcome.GONE)
        return outcomes

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, record in zip(self._slots(spec), keys, records, strict=True):
            if layout.key_in(self.region.entry(slot)) != key:
                outcomes.append(Outcome.GONE)
                continue
            self.region.record(slot)[: len(record)] = record
            outcomes.append(Outcome.OK)
        return outcomes

    def close(self) -> None:
        self.region.close()
        self._then()
