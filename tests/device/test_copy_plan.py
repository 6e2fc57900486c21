"""The vectorised plan against the obvious walk over pages."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.device.device_worlds import World, jobs, pages, worlds

from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef, cut, describe

FAR = 1 << 40
"""Records lie so far apart in these tests that an address names record and offset."""


def planned(layout: DeviceLayout, blocks: DeviceBlocks) -> list[tuple[int, int, int]]:
    """Device, host and size of every copy of a job, group by group."""
    chunks = cut(layout, blocks)
    records = np.arange(1, len(chunks) + 1, dtype=np.int64) * FAR
    found: list[tuple[int, int, int]] = []
    for group in range(len(layout.groups)):
        rows = [row for row, each in enumerate(chunks.groups) if each == group]
        copies = describe(layout, group, chunks.ids[rows], records[rows] + layout.part_at(group))
        found += zip(*(column.tolist() for column in copies), strict=True)
    return found


@given(st.data())
def test_copies_are_what_the_obvious_walk_finds(data: st.DataObject) -> None:
    """Each once, in the order of records, and none that could have been one with the last."""
    world: World = data.draw(worlds())
    layout = world.layout
    blocks = data.draw(jobs(layout))
    copies = planned(layout, blocks)
    bytes_of = [
        (device + byte, host // FAR - 1, host % FAR + byte)
        for device, host, size in copies
        for byte in range(size)
    ]
    assert sorted(bytes_of) == sorted(
        (page.device + byte, page.record, page.host + byte)
        for page in pages(layout, blocks)
        for byte in range(page.size)
    )
    records = [host // FAR for _, host, _ in copies]
    assert records == sorted(records)
    for (device, host, size), (next_device, next_host, _) in itertools.pairwise(copies):
        assert (next_device, next_host) != (device + size, host + size)


@given(st.data())
def test_rows_cover_the_job_and_know_what_is_whole(data: st.DataObject) -> None:
    layout = data.draw(worlds()).layout
    blocks = data.draw(jobs(layout))
    chunks = cut(layout, blocks)
    assert chunks.ids[chunks.ids >= 0].tolist() == blocks.ids.tolist()
    seen = collections.Counter(page.record for page in pages(layout, blocks))
    for index, ids in enumerate(chunks.ids):
        refs = len(layout.groups[chunks.groups[index]])
        assert seen[index] == refs * (ids >= 0).sum()


def test_a_block_must_be_there_in_every_tensor_of_its_group() -> None:
    tensors = DeviceTensor(0, 4, 8, 8), DeviceTensor(64, 2, 8, 8)
    layout = DeviceLayout(
        tensors, ((PageRef(0, 8),), (PageRef(1, 8),), (PageRef(0, 8), PageRef(1, 8)))
    )
    assert layout.blocks == (4, 2, 2)
    assert len(cut(layout, DeviceBlocks(np.array([3, 1, 1]), [1, 1, 1], [0, 0, 0]))) == 3
    for sizes in ([0, 1, 0], [0, 0, 1]):
        with pytest.raises(ValueError, match="between 0 and 1"):
            cut(layout, DeviceBlocks(np.array([3]), sizes, [0, 0, 0]))


def test_an_empty_job_has_no_copies() -> None:
    layout = DeviceLayout((DeviceTensor(0, 4, 8, 8),), ((PageRef(0, 8),),))
    blocks = DeviceBlocks(np.zeros(0, np.int64), [0], [3])
    assert len(cut(layout, blocks)) == 0
    assert planned(layout, blocks) == []


@pytest.mark.parametrize(
    ("ids", "sizes", "starts"),
    [([4], [1], [0]), ([-1], [1], [0]), ([0], [2], [0]), ([0], [1, 0], [0, 0]), ([0], [1], [])],
)
def test_impossible_jobs_are_refused(ids: list[int], sizes: list[int], starts: list[int]) -> None:
    layout = DeviceLayout((DeviceTensor(0, 4, 8, 8),), ((PageRef(0, 8),),))
    with pytest.raises(ValueError, match=r"block"):
        cut(layout, DeviceBlocks(np.array(ids, np.int64), sizes, starts))


@pytest.mark.parametrize(
    ("tensor", "ref", "per_chunk", "part"),
    [
        (DeviceTensor(0, 4, 8, 9), PageRef(0, 8), 1, 0),
        (DeviceTensor(0, 0, 8, 8), PageRef(0, 8), 1, 0),
        (DeviceTensor(0, 4, 8, 8), PageRef(1, 8), 1, 0),
        (DeviceTensor(0, 4, 8, 8), PageRef(0, 9), 1, 0),
        (DeviceTensor(0, 4, 10, 8), PageRef(0, 9), 1, 0),
        (DeviceTensor(0, 4, 8, 8), PageRef(0, 0), 1, 0),
        (DeviceTensor(0, 4, 8, 8), PageRef(0, 8), 0, 0),
        (DeviceTensor(0, 4, 8, 8), PageRef(0, 8), 1, 1),
    ],
)
def test_impossible_layouts_are_refused(
    tensor: DeviceTensor, ref: PageRef, per_chunk: int, part: int
) -> None:
    with pytest.raises(ValueError, match=r"."):
        DeviceLayout((tensor,), ((ref,),), per_chunk, part)


def test_groups_must_use_something_and_all_have_a_name_or_none() -> None:
    tensors, one = (DeviceTensor(0, 4, 8, 8),), (PageRef(0, 8),)
    for groups, names in (((), ()), (((),), ()), ((one, one), (1,)), ((one,), (0, 1))):
        with pytest.raises(ValueError, match="group"):
            DeviceLayout(tensors, groups, group_ids=names)


@given(st.data())
def test_ranks_with_fewer_layers_take_as_much_room(data: st.DataObject) -> None:
    """What each page is in the record stays where it was; the rest is the last one again."""
    layout: DeviceLayout = data.draw(worlds()).layout
    more = [data.draw(st.integers(0, 3)) for _ in layout.groups]
    per_chunk, parts = layout.blocks_per_chunk, layout.parts
    stated = [
        size + parts * per_chunk * times * refs[-1].page_bytes
        for size, refs, times in zip(layout.group_bytes, layout.groups, more, strict=True)
    ]
    wide = layout.widened(stated)
    assert list(wide.group_bytes) == stated
    assert wide.widened(stated) == wide
    for group, refs in enumerate(layout.groups):
        assert wide.groups[group][: len(refs)] == refs
        assert set(wide.groups[group][len(refs) :]) <= {refs[-1]}
        assert wide.ref_at[group][: len(refs)] == layout.ref_at[group]
    assert layout.widened([0] * len(stated)) == layout, "there is no room for less"
