"""The vectorised plan against the obvious walk over pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.device.device_worlds import World, jobs, pages, worlds

from kvtier.device.copier import Blocks, DeviceLayout, DeviceTensor, PageRef, cut, describe

FAR = 1 << 40
"""Records lie so far apart in these tests that an address names record and offset."""


@given(st.data())
def test_copies_are_what_the_obvious_walk_finds(data: st.DataObject) -> None:
    world: World = data.draw(worlds())
    layout = world.layout
    blocks = data.draw(jobs(layout))
    pieces = cut(layout, blocks)
    records = np.arange(1, len(pieces) + 1, dtype=np.int64) * FAR
    copies = describe(layout, blocks, pieces, records)

    planned = set()
    for index in range(len(pieces)):
        for at in range(copies.starts[index], copies.starts[index + 1]):
            assert copies.host[at] // FAR == index + 1, "copies come in the order of records"
            for byte in range(copies.sizes[at]):
                device = int(copies.device[at]) + byte
                planned.add((device, index, int(copies.host[at]) % FAR + byte))
    assert sum(copies.sizes.tolist()) == len(planned), "nothing is copied twice"
    walked = {
        (page.device + byte, page.record, page.host + byte)
        for page in pages(layout, blocks)
        for byte in range(page.size)
    }
    assert planned == walked


@given(st.data())
def test_no_two_copies_could_have_been_one(data: st.DataObject) -> None:
    world: World = data.draw(worlds())
    blocks = data.draw(jobs(world.layout))
    pieces = cut(world.layout, blocks)
    records = np.arange(1, len(pieces) + 1, dtype=np.int64) * FAR
    copies = describe(world.layout, blocks, pieces, records)
    for at in range(1, len(copies.sizes)):
        size = copies.sizes[at - 1]
        follows = copies.device[at] == copies.device[at - 1] + size
        assert not (follows and copies.host[at] == copies.host[at - 1] + size)


@given(st.data())
def test_pieces_cover_the_job_and_know_what_is_whole(data: st.DataObject) -> None:
    world: World = data.draw(worlds())
    layout = world.layout
    blocks = data.draw(jobs(layout))
    pieces = cut(layout, blocks)
    assert sum(pieces.length.tolist()) == len(blocks.ids)
    seen: dict[int, int] = {}
    for page in pages(layout, blocks):
        seen[page.record] = seen.get(page.record, 0) + 1
    for index, is_whole in enumerate((pieces.length == layout.blocks_per_chunk).tolist()):
        refs = len(layout.groups[pieces.group[index]])
        assert is_whole == (seen[index] == refs * layout.blocks_per_chunk)


def test_neighbouring_blocks_of_a_layer_are_one_copy() -> None:
    layout = DeviceLayout(
        tuple(DeviceTensor(layer * 10_000, 8, 100, 100) for layer in range(3)),
        (tuple(PageRef(layer, 100) for layer in range(3)),),
        blocks_per_chunk=4,
    )
    blocks = Blocks(np.arange(4), [4], [0])
    copies = describe(layout, blocks, cut(layout, blocks), np.array([FAR]))
    assert copies.sizes.tolist() == [400, 400, 400]


def test_a_block_that_lies_in_one_piece_is_one_copy() -> None:
    layout = DeviceLayout(
        tuple(DeviceTensor(layer * 100, 8, 300, 100) for layer in range(3)),
        (tuple(PageRef(layer, 100) for layer in range(3)),),
    )
    blocks = Blocks(np.array([5, 2]), [2], [0])
    copies = describe(layout, blocks, cut(layout, blocks), np.array([FAR, 2 * FAR]))
    assert copies.sizes.tolist() == [300, 300]
    assert copies.device.tolist() == [1500, 600]


def test_no_copy_goes_on_into_the_next_record() -> None:
    """Even if that begins where the part ends."""
    layout = DeviceLayout((DeviceTensor(0, 8, 100, 100),), ((PageRef(0, 100),),), 2)
    blocks = Blocks(np.arange(4), [4], [0])
    copies = describe(layout, blocks, cut(layout, blocks), np.array([FAR, FAR + 200]))
    assert copies.sizes.tolist() == [200, 200]
    assert copies.starts.tolist() == [0, 1, 2]


def test_a_block_must_be_there_in_every_tensor() -> None:
    layout = DeviceLayout(
        (DeviceTensor(0, 4, 8, 8), DeviceTensor(64, 2, 8, 8)), ((PageRef(0, 8),), (PageRef(1, 8),))
    )
    assert len(cut(layout, Blocks(np.array([1]), [1, 0], [0, 0]))) == 1
    with pytest.raises(ValueError, match="between 0 and 1"):
        cut(layout, Blocks(np.array([2]), [1, 0], [0, 0]))


def test_an_empty_job_has_no_copies() -> None:
    layout = DeviceLayout((DeviceTensor(0, 4, 8, 8),), ((PageRef(0, 8),),))
    blocks = Blocks(np.zeros(0, np.int64), [0], [3])
    pieces = cut(layout, blocks)
    assert len(pieces) == 0
    assert describe(layout, blocks, pieces, np.zeros(0, np.int64)).starts.tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "sizes", "starts"),
    [([4], [1], [0]), ([-1], [1], [0]), ([0], [2], [0]), ([0], [1, 0], [0, 0]), ([0], [1], [])],
)
def test_impossible_jobs_are_refused(ids: list[int], sizes: list[int], starts: list[int]) -> None:
    layout = DeviceLayout((DeviceTensor(0, 4, 8, 8),), ((PageRef(0, 8),),))
    with pytest.raises(ValueError, match=r"block"):
        cut(layout, Blocks(np.array(ids, np.int64), sizes, starts))


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


def test_a_record_is_as_long_as_all_parts_of_it() -> None:
    layout = DeviceLayout(
        (DeviceTensor(0, 4, 8, 8),), ((PageRef(0, 8),), (PageRef(0, 4),)), 2, 0, 2
    )
    assert layout.group_bytes == (32, 16)


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
