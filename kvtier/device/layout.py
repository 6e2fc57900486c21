"""An engine's KV tensors in plain numbers, where their pages go in a record, and a job's copies.

A group's chunk is `blocks_per_chunk` consecutive blocks of it. One rank's part of a record holds,
for every page reference of the group in order, that reference's pages of all the chunk's blocks: so
what lies together on the device lies together in the record, and neighbouring blocks are one copy.
All of this is pure and vectorised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.record.record import HEADER_BYTES

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


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
    heads: int = 0
    """How many heads this rank has there; 0 where it is not known how their bytes lie."""
    head_bytes: int = 0
    """So many bytes of each of them lie together, those of all heads one behind the other, over and
    over: of a token, or of all tokens of the page."""


class HeadShape(NamedTuple):
    """How many heads a rank has of a layer, and how many bytes of each lie together (`PageRef`)."""

    heads: int = 0
    head_bytes: int = 0


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
            if ref.heads and ref.page_bytes % (ref.heads * ref.head_bytes):
                raise ValueError(f"the heads do not fill the pages of {ref}")

    @classmethod
    def of_caches(
        cls,
        caches: Any,
        blocks_per_chunk: int,
        part: int = 0,
        parts: int = 1,
        group_ids: Sequence[int] = (),
        heads: Sequence[Sequence[HeadShape]] = (),
    ) -> Self:
        """Describe canonical KV caches: anything with vLLM's `tensors` and `group_data_refs`.
        `heads` are those of each reference, by group, if they are known."""
        tensors = []
        for entry in caches.tensors:
            tensor = entry.tensor
            size = tensor.element_size()
            stride = tensor.stride(0) * size
            tensors.append(
                DeviceTensor(tensor.data_ptr(), tensor.shape[0], stride, entry.page_size_bytes)
            )
        shapes = heads or [[HeadShape()] * len(group) for group in caches.group_data_refs]
        groups = tuple(
            tuple(
                PageRef(ref.tensor_idx, ref.page_size_bytes, *shape)
                for ref, shape in zip(group, of_group, strict=True)
            )
            for group, of_group in zip(caches.group_data_refs, shapes, strict=True)
        )
        return cls(tuple(tensors), groups, blocks_per_chunk, part, parts, tuple(group_ids))

    @cached_property
    def key_groups(self) -> tuple[int, ...]:
        """The index that keys of each group carry."""
        return self.group_ids or tuple(range(len(self.groups)))

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """What block numbers are below, by group."""
        return tuple(min(self.tensors[ref.tensor].blocks for ref in group) for group in self.groups)

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

    @cached_property
    def knows_heads(self) -> bool:
        """Whether records that another number of ranks has written can be loaded, too."""
        return all(ref.heads for group in self.groups for ref in group)

    def part_at(self, group: int) -> int:
        """Where this rank's part begins in a record."""
        return HEADER_BYTES + self.part * self.part_bytes[group]

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


class DeviceBlocks(NamedTuple):
    """Device blocks of a job: per group `sizes[g]` block numbers, the first of which is block
    `starts[g]` of its request. Chunks are counted from the request's first block."""

    ids: Ints
    sizes: Sequence[int]
    starts: Sequence[int]


class ChunkRows(NamedTuple):
    """A job cut at chunk borders, one row a record, in the order of the job's keys."""

    groups: list[int]
    ids: Ints
    """The block at each place of a row's chunk; -1 where a partial chunk has none."""

    def __len__(self) -> int:
        return len(self.groups)


class PageCopies(NamedTuple):
    """Contiguous copies, in the order of records. Addresses wrap like pointers do."""

    device: Ints
    host: Ints
    sizes: Ints


def cut(layout: DeviceLayout, blocks: DeviceBlocks) -> ChunkRows:
    """Cut a job into the rows of its records; raises ValueError on blocks that cannot be."""
    ids, sizes, starts = blocks
    if len(sizes) != len(layout.groups) or len(starts) != len(sizes) or sum(sizes) != len(ids):
        raise ValueError("a job names blocks and a start for every group")
    per_chunk, at = layout.blocks_per_chunk, 0
    groups: list[int] = []
    rows: list[Ints] = [np.empty((0, per_chunk), np.int64)]
    for group, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        first = start % per_chunk
        count = -(-(first + size) // per_chunk) if size else 0
        own = ids[at : at + size]
        if size and not 0 <= int(own.min()) <= int(own.max()) < layout.blocks[group]:
            raise ValueError(f"block numbers lie between 0 and {layout.blocks[group] - 1}")
        row = np.full(count * per_chunk, -1, np.int64)
        row[first : first + size] = own
        rows.append(row.reshape(count, per_chunk))
        groups += [group] * count
        at += size
    return ChunkRows(groups, np.concatenate(rows))


def describe(layout: DeviceLayout, group: int, ids: Ints, parts: Ints) -> PageCopies:
    """The copies of some rows of a group, whose parts of records lie at these addresses; neighbours
    that continue each other on both sides are one copy."""
    refs = layout.groups[group]
    tensors = [layout.tensors[ref.tensor] for ref in refs]
    base = np.array([tensor.base for tensor in tensors])[:, None]
    stride = np.array([tensor.stride for tensor in tensors])[:, None]
    size = np.array([ref.page_bytes for ref in refs])[:, None]
    place = np.array(layout.ref_at[group])[:, None] + size * np.arange(layout.blocks_per_chunk)
    blocks = ids[:, None, :]
    columns = (base + stride * blocks, parts[:, None, None] + place, size, blocks >= 0)
    device, host, sizes, there = (each.ravel() for each in np.broadcast_arrays(*columns))
    device, host, sizes = device[there], host[there], sizes[there]
    if not len(sizes):
        return PageCopies(device, host, sizes)
    apart = (device[1:] != device[:-1] + sizes[:-1]) | (host[1:] != host[:-1] + sizes[:-1])
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    return PageCopies(device[first], host[first], np.add.reduceat(sizes, first))
