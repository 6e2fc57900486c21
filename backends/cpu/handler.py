"""The data side of the region: records in place, for the mover and for an engine's workers."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.backends.cpu.region import Region
from kvtier.backends.cpu.tier import CpuSpec
from kvtier.interfaces.handler import RegionHandler, own_spec
from kvtier.record.record import Buffer
from kvtier.slab import layout
from kvtier.types import BlockKey, LoadStoreSpec, Outcome


class CpuHandler(RegionHandler):
    """Maps the region that the engine's tier owns."""

    def __init__(self, region: Region) -> None:
        self.region: Region = region

    def views(self, spec: LoadStoreSpec) -> list[Buffer]:
        return [self.region.record(slot) for slot in own_spec(spec, CpuSpec).slots]

    def landed(self, spec: LoadStoreSpec, index: int, outcome: Outcome) -> None:
        slot = own_spec(spec, CpuSpec).slots[index]
        if self.region.state(slot) == layout.RESERVED:
            state = layout.ARRIVED if outcome.ok else layout.FAILED
            self.region.table[layout.entry_at(slot)] = state

    def load(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], into: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, buffer in zip(own_spec(spec, CpuSpec).slots, keys, into, strict=True):
            before = self.region.entry(slot)
            record = self.region.record(slot)
            buffer[: len(record)] = record
            mine = before[0] == layout.VALID and layout.entry_key(self.region.table, slot) == key
            kept = layout.same_block(self.region.entry(slot), before)
            outcomes.append(Outcome.OK if mine and kept else Outcome.GONE)
        return outcomes

    def store(
        self, spec: LoadStoreSpec, keys: Sequence[BlockKey], records: Sequence[Buffer]
    ) -> list[Outcome]:
        outcomes = []
        for slot, key, record in zip(own_spec(spec, CpuSpec).slots, keys, records, strict=True):
            if layout.entry_key(self.region.table, slot) != key:
                outcomes.append(Outcome.GONE)
                continue
            self.region.record(slot)[: len(record)] = record
            outcomes.append(Outcome.OK)
        return outcomes

    def close(self) -> None:
        self.region.close()
