"""The catalogue of a CPU region: dictionaries, written through to the mapped table."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from kvtier.backends.cpu import sharing
from kvtier.backends.cpu.owned_region import OwnedRegion
from kvtier.backends.cpu.region_locks import list_path
from kvtier.core.retained.kept_list import KeptList
from kvtier.eviction import EvictionPolicy
from kvtier.slab import layout
from kvtier.slab.catalogue import SlabTier
from kvtier.slab.layout import pinning_order, place_of
from kvtier.system.disk import Disk
from kvtier.types import BlockKey, SlotSpec, TierStats


class CpuSpec(SlotSpec, tag="cpu"):
    """Slots of the engine's region."""

    medium: ClassVar[str] = "cpu"


_NOTE_USE_S = 3600.0


class CpuTier(SlabTier):
    """Slots in shared memory; a commit is one byte written to the table."""

    def __init__(self, owned: OwnedRegion, policy: EvictionPolicy, *, discard: bool) -> None:
        header = owned.region.header
        super().__init__("cpu", header.slot_bytes, policy, time.time)
        self.region = owned.region
        self._owned_region = owned
        self._discard = discard
        self._kept: KeptList | None = None
        self._note_use_at = 0.0
        self._table = owned.region.table
        self._key_of = [None] * header.slots
        self._policy.resize(header.slots)
        sharing.begin(owned.region.table)
        entries = layout.read_entries(self._table, header.slots)
        self._places = place_of(pinning_order(header, entries), header.slots)
        """Where in the order of pinning each slot comes."""
        self._pinning = True
        """Until all are pinned."""
        self._recover(header.slots)

    def _recover(self, slots: int) -> None:
        """Take over what an earlier owner committed, and free what it had not."""
        entries = layout.read_entries(self._table, slots)
        states = entries["state"]
        valid = layout.committed(entries)
        used = layout.last_used(entries)
        valid = valid[np.argsort(used[valid], kind="stable")]
        self._generation = int(entries["generation"].max(initial=0))
        bad = np.flatnonzero(states == layout.BAD).tolist()
        copies = self._adopt(
            valid.tolist(), layout.keys_of(entries[valid]), array("d", used[valid].tobytes())
        )
        self._survivors.add(valid, used[valid], entries["uses"][valid])
        held = np.zeros(slots, bool)
        held[valid] = True
        held[bad] = True
        del entries, states
        self._quarantine.extend(bad)
        free = np.array(np.flatnonzero(~held).tolist() + copies, np.intp)
        self._make_free(free[np.argsort(self._places[free])].tolist())

    def _locate(self, slots: list[int]) -> CpuSpec:
        return CpuSpec(slots)

    def _on_reserved(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._generation = (self._generation + 1) & 0xFFFFFFFF
        packed = layout.pack_entries(layout.FREE, keys, self._generation, int(self._clock()))
        entries = layout.read_entries(self._table, len(self._key_of))
        rows = np.array(slots, np.intp)
        entries[rows] = np.frombuffer(packed, layout.ENTRY_DTYPE)
        entries["state"][rows] = layout.RESERVED

    def _set_state(self, slots: Sequence[int], state: int) -> None:
        table, entry_bytes, table_at = self._table, layout.ENTRY_BYTES, layout.TABLE_AT
        for slot in slots:
            table[table_at + slot * entry_bytes] = state

    def _on_committed(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> None:
        self._set_state(slots, layout.VALID)

    def _make_free(self, slots: Sequence[int]) -> None:
        self._set_state(slots, layout.FREE)
        near = self._pinned_among(slots) if self._pinning else ()
        if near:
            self._free.extendleft(reversed(near))
            slots = sorted(set(slots).difference(near))
        super()._make_free(slots)

    def _pinned_among(self, slots: Sequence[int]) -> list[int]:
        """Those that a device reaches already: they are to be used before others, as long as there
        are others."""
        pinned = sharing.pinned(self._table) or 0
        if pinned >= len(self._key_of):
            self._pinning = False
            return []
        return [slot for slot in slots if self._places[slot] < pinned]

    def _on_dropped(self, slots: Sequence[int]) -> None:
        self._set_state(slots, layout.FREE)

    def give_up(self, keys: Sequence[BlockKey]) -> None:
        waiting = [key for key in keys if self._state_of(key) == layout.RESERVED]
        self._set_state([self._reserved[key] for key in waiting], layout.FAILED)

    def arrived(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if self._state_of(key) == layout.ARRIVED]

    def _state_of(self, key: BlockKey) -> int | None:
        """What the table says of a reserved key: movers and workers write there, too."""
        slot = self._reserved.get(key)
        return None if slot is None else self._table[layout.entry_at(slot)]

    def _on_quarantined(self, slot: int, key: BlockKey) -> None:
        self._set_state([slot], layout.BAD)

    def _note_uses(self, slots: Sequence[int]) -> None:
        entries = layout.read_entries(self._table, len(self._key_of))
        rows = np.array(slots, np.intp)
        entries["used_at"][rows] = int(self._clock())
        entries["uses"][rows] += 1

    def _on_carried(self, used: Mapping[int, tuple[int, int]]) -> None:
        entries = layout.read_entries(self._table, len(self._key_of))
        for slot, (uses, at) in used.items():
            entries["used_at"][slot], entries["uses"][slot] = at, uses

    def retain_at_most(self, blocks: int) -> None:
        super().retain_at_most(blocks)
        if blocks and not self._discard:
            path = list_path(self.region.path)
            self._kept = KeptList(self.retained, path, self.region.namespace, Disk())
            self._kept.begin()

    @property
    def unwritten(self) -> bool:
        return self._kept is not None and self._kept.unwritten

    def tick(self) -> None:
        super().tick()
        if self._kept is not None:
            self._kept.write()
        now = time.monotonic()  # a clock that is put back must not keep it from being said
        if now >= self._note_use_at:
            self._note_use_at = now + _NOTE_USE_S
            self._owned_region.note_use()

    def stats(self) -> TierStats:
        stats = super().stats()
        stats.bytes_capacity = len(self._key_of) * self.slot_bytes
        return stats

    def close(self) -> None:
        if self._kept is not None:
            self._kept.write(at_once=True)
        self._table = memoryview(b"")
        self._owned_region.close(remove=self._discard)
