"""An engine's KV tensors in plain numbers, and where their pages go in a record.

A group's chunk is `blocks_per_chunk` consecutive blocks of it. One rank's part of a record holds,
for every page reference of the group in order, that reference's pages of all the chunk's blocks: so
what lies together on the device lies together in the record, and neighbouring blocks are one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import msgspec


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
