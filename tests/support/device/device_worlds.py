"""Device layouts in memory that tests own, and the obvious way to copy their pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.record.record import HEADER_BYTES, Buffer, record_bytes
from kvtier.slab import layout as table
from kvtier.types import BlockKey, block_key

NAMESPACE = bytes(range(16))


class World(NamedTuple):
    """A layout whose tensors lie in one array, with gaps between them."""

    layout: DeviceLayout
    memory: npt.NDArray[np.uint8]

    def arrays(self) -> list[npt.NDArray[np.uint8]]:
        return [
            np.lib.stride_tricks.as_strided(
                self.memory[tensor.base :], (tensor.blocks, tensor.page_bytes), (tensor.stride, 1)
            )
            for tensor in self.layout.tensors
        ]

    def addressed(self) -> DeviceLayout:
        """The layout with real addresses for bases."""
        at: int = self.memory.ctypes.data
        tensors = tuple(
            DeviceTensor(at + each.base, each.blocks, each.stride, each.page_bytes)
            for each in self.layout.tensors
        )
        same = self.layout
        return DeviceLayout(tensors, same.groups, same.blocks_per_chunk, same.part, same.parts)


@st.composite
def worlds(draw: Any) -> World:
    """Layers side by side, packed into one block, padded, aliased by groups, or all of it."""
    blocks = draw(st.integers(1, 12))
    unit = draw(st.sampled_from([1, 4, 64]))
    tensors, at = [], draw(st.integers(0, 5))
    if draw(st.booleans()):  # packed: the layers of a block lie together
        layers = draw(st.integers(1, 4))
        pages = [unit * draw(st.integers(1, 4)) for _ in range(layers)]
        stride = sum(pages) + draw(st.integers(0, 8))
        for page in pages:
            tensors.append(DeviceTensor(at, blocks, stride, page))
            at += page
        at += stride * blocks
    page = unit * draw(st.integers(1, 6))
    for _ in range(draw(st.integers(0 if tensors else 1, 4))):
        page = draw(st.sampled_from([page, unit * draw(st.integers(1, 6))]))
        stride = page + draw(st.sampled_from([0, 0, 3]))
        tensors.append(DeviceTensor(at, blocks, stride, page))
        at += stride * blocks + draw(st.sampled_from([0, 0, 7]))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=1, unique=True))
        padding = draw(st.booleans())
        refs = tuple(
            PageRef(index, max(1, tensors[index].page_bytes - (padding and unit // 2)))
            for index in sorted(used)
        )
        # As of a rank whose neighbours in a pipeline hold more layers.
        groups.append(refs + refs[-1:] * draw(st.sampled_from([0, 0, 0, 2])))
    parts = draw(st.integers(1, 3))
    layout = DeviceLayout(
        tuple(tensors),
        tuple(groups),
        draw(st.integers(1, 4)),
        draw(st.integers(0, parts - 1)),
        parts,
    )
    seed = draw(st.integers(0, 1 << 16))
    memory = np.random.default_rng(seed).integers(0, 256, at + 64, dtype=np.uint8)
    return World(layout, memory)


@st.composite
def jobs(draw: Any, layout: DeviceLayout, *, whole: bool = False) -> DeviceBlocks:
    """Distinct blocks, split over the groups; with partial first and last chunks or without."""
    blocks = min(layout.blocks)
    ids = draw(st.lists(st.integers(0, blocks - 1), unique=True, max_size=blocks))
    if draw(st.booleans()):
        ids.sort()
    sizes, starts, left = [], [], len(ids)
    for _ in layout.groups:
        size = draw(st.integers(0, left))
        start = draw(st.integers(0, 9))
        if whole:
            size -= size % layout.blocks_per_chunk
            start *= layout.blocks_per_chunk
        sizes.append(size)
        starts.append(start)
        left -= size
    return DeviceBlocks(np.array(ids[: sum(sizes)], np.int64), sizes, starts)


class Page(NamedTuple):
    """One page of a job: where it lies on the device, and in which record."""

    device: int
    record: int
    host: int
    size: int


def pages(layout: DeviceLayout, blocks: DeviceBlocks) -> Iterator[Page]:
    """The obvious walk over a job, page by page."""
    record, at = -1, 0
    for group, refs in enumerate(layout.groups):
        part_bytes = layout.blocks_per_chunk * sum(ref.page_bytes for ref in refs)
        for i in range(blocks.sizes[group]):
            place = (blocks.starts[group] + i) % layout.blocks_per_chunk
            if i == 0 or place == 0:
                record += 1
            host = HEADER_BYTES + layout.part * part_bytes
            for ref in refs:
                tensor = layout.tensors[ref.tensor]
                yield Page(
                    tensor.base + int(blocks.ids[at]) * tensor.stride,
                    record,
                    host + place * ref.page_bytes,
                    ref.page_bytes,
                )
                host += layout.blocks_per_chunk * ref.page_bytes
            at += 1


class MemoryHost:
    """Slots in ordinary memory with a table of entries."""

    def __init__(self, layout: DeviceLayout, slots: int) -> None:
        self.slot_bytes = record_bytes(max(layout.group_bytes))
        self.memory = np.zeros(slots * self.slot_bytes + 4096, np.uint8)
        self._skip = -self.memory.ctypes.data % 4096
        self._view = self.memory.data
        self._slots = slots
        self.entries = [bytes(table.ENTRY_BYTES)] * slots

    def record(self, slot: int) -> Buffer:
        at = self._skip + slot * self.slot_bytes
        return self._view[at : at + self.slot_bytes]

    def state(self, slot: int) -> int:
        return self.entries[slot][0]

    def entry(self, slot: int) -> bytes:
        return self.entries[slot]

    def entries_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        entries = b"".join([self.entry(slot) for slot in slots.tolist()])
        return np.frombuffer(entries, table.ENTRY_DTYPE)

    @property
    def data(self) -> Buffer:
        return self._view[self._skip : self._skip + self._slots * self.slot_bytes]

    def put(self, slot: int, key: BlockKey, state: int, generation: int = 1) -> None:
        self.entries[slot] = table.pack_entries(state, [key], generation, 0)


def keys_of(count: int, tag: int = 0, groups: Sequence[int] = ()) -> list[BlockKey]:
    return [
        block_key(index.to_bytes(8, "big") + tag.to_bytes(8, "big"), groups[index] if groups else 0)
        for index in range(count)
    ]
