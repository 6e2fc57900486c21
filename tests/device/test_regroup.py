"""Records that another number of ranks has written, loaded against the obvious walk over heads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device.device_worlds import MemoryHost
from support.device.ranks import (
    DEGREES,
    LOAD,
    STORE,
    Group,
    Model,
    Rank,
    job_of,
    models,
    write,
)

from kvtier.device.layout import DeviceLayout, PageRef
from kvtier.record.record import HEADER_BYTES, PIECE_BYTES
from kvtier.slab import layout as table
from kvtier.types import Outcome


def test_ranks_write_what_others_expect() -> None:
    model = Model([Group(2, 4, 8, 64), Group(1, 1, 4, 128)], 4, 2)
    cache, job = model.filled(4), job_of(STORE, model)
    expected = write(model, 4, cache)
    host = MemoryHost(Rank(model, 4, 0).layout, len(job.keys))
    for slot, key in enumerate(job.keys):
        host.put(slot, key, table.RESERVED)
    for at in range(4):
        rank = Rank(model, 4, at)
        rank.take(cache)
        assert rank.run(host, job).ok
    assert host.data == expected.data


@pytest.mark.parametrize("copies", ["cpu", "streams", "staged"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_number_of_ranks_reads_what_another_wrote(copies: str, data: st.DataObject) -> None:
    writers, readers = (data.draw(st.sampled_from(DEGREES)) for _ in range(2))
    model = data.draw(models(writers, readers))
    cache = model.filled(data.draw(st.integers(0, 1 << 16)))
    host = write(model, writers, cache)
    rank = Rank(model, readers, data.draw(st.integers(0, readers - 1)))
    assert rank.run(host, job_of(LOAD, model), copies).ok
    assert rank.has(cache)


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (6, 4), (3, 2)])
def test_heads_that_are_split_across_parts_come_from_each(writers: int, readers: int) -> None:
    model = Model([Group(2, 4, 12, 64), Group(1, 1, 24, 96)], 4, 2)
    cache = model.filled(5)
    host = write(model, writers, cache)
    for at in range(readers):
        rank = Rank(model, readers, at)
        assert rank.run(host, job_of(LOAD, model)).ok
        assert rank.has(cache)


@pytest.mark.parametrize("copies", ["cpu", "streams", "staged"])
@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4), (4, 1), (1, 4), (2, 2)])
def test_a_flipped_bit_is_blamed_on_its_block_by_those_who_need_it(
    copies: str, writers: int, readers: int
) -> None:
    """In the share of the last writer, in one of three records; parts of several pieces, too."""
    model = Model([Group(3, 16, 8, PIECE_BYTES // 256)], 3, 1)
    cache = model.filled(6)
    host = write(model, writers, cache)
    record = host.record(1)
    record[HEADER_BYTES + host.slot_bytes // 4096 * 4096 - 4096 - 5000] ^= 4
    for at in range(readers):
        rank = Rank(model, readers, at)
        result = rank.run(host, job_of(LOAD, model), copies)
        needs_it = (at + 1) * writers > (writers - 1) * readers
        if not needs_it:
            assert result.ok
            assert rank.has(cache)
        else:
            others = {Outcome.OK, Outcome.CANCELLED}
            assert result.outcomes[1] is Outcome.CORRUPT
            assert set(result.outcomes[::2]) <= others
            assert result.outcomes[0] is not Outcome.OK or rank.has(cache, [0])


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["cpu", "streams", "staged"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_by_those_who_need_its_part(
    copies: str, data: st.DataObject
) -> None:
    """A rank has heads `rank * heads / readers` and up, and takes all parts with any of these."""
    writers, readers = (data.draw(st.sampled_from(DEGREES)) for _ in range(2))
    model = data.draw(models(writers, readers))
    cache, job = model.filled(data.draw(st.integers(0, 1 << 16))), job_of(LOAD, model)
    host = write(model, writers, cache)
    flipped = data.draw(st.integers(0, len(job.keys) - 1))
    chunks = model.blocks // model.per_chunk
    heads = model.groups[flipped // chunks].heads
    part_bytes = Rank(model, writers, 0).layout.part_bytes[flipped // chunks]
    at = data.draw(st.integers(0, writers * part_bytes - 1))
    host.record(flipped)[HEADER_BYTES + at] ^= 1 << data.draw(st.integers(0, 7))
    spoilt = {head for head in range(heads) if head * writers // heads == at // part_bytes}
    for number in data.draw(st.sets(st.integers(0, readers - 1), min_size=1, max_size=3)):
        rank = Rank(model, readers, number)
        result = rank.run(host, job, copies)
        if spoilt.isdisjoint(head for head in range(heads) if head * readers // heads == number):
            assert result.ok
            assert rank.has(cache)
            continue
        assert result.outcomes[flipped] is Outcome.CORRUPT
        for slot, outcome in enumerate(result.outcomes):
            group, chunk = divmod(slot, chunks)
            blocks = range(chunk * model.per_chunk, (chunk + 1) * model.per_chunk)
            assert outcome in (Outcome.OK, Outcome.CANCELLED) or slot == flipped
            assert outcome is not Outcome.OK or rank.has(cache, blocks, slice(group, group + 1))


def test_one_job_takes_records_of_several_numbers_of_ranks() -> None:
    model = Model([Group(2, 2, 8, 64)], 4, 1)
    cache = model.filled(7)
    hosts = [write(model, degree, cache) for degree in (2, 1, 8, 2)]
    for slot, host in enumerate(hosts[1:], 1):
        hosts[0].record(slot)[:] = host.record(slot)
    rank = Rank(model, 2, 1)
    assert rank.run(hosts[0], job_of(LOAD, model)).outcomes == [Outcome.OK] * 4
    assert rank.has(cache)


@pytest.mark.parametrize("wrong", ["parts", "shares", "unknown"])
def test_what_cannot_be_regrouped_is_not_served(wrong: str) -> None:
    """More parts than heads, another model's shares, or pages whose heads nobody knows."""
    model = Model([Group(1, 2, 4, 96)], 1, 1)
    others = Model([Group(1, 2, 8, 48)], 1, 1) if wrong == "parts" else model
    degree = 8 if wrong == "parts" else 4
    host = write(others, degree, others.filled(8))
    rank = Rank(model, 2, 0)
    if wrong == "shares":
        host.record(0)[128:136] = bytes(8)
    elif wrong == "unknown":
        (ref,) = rank.layout.groups[0]
        plain = PageRef(ref.tensor, ref.page_bytes)
        rank.layout = DeviceLayout(rank.layout.tensors, ((plain,),), 1, 0, 2)
    assert rank.run(host, job_of(LOAD, model)).outcomes == [Outcome.CORRUPT]
    assert not rank.arrays[0].any()
