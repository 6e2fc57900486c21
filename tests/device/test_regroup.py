"""Records that another number of ranks has written, loaded against the obvious walk over heads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of
from support.device.fake_device import FakeDevice

from kvtier.device.copier import CopyJob, CopyResult, DeviceCopier
from kvtier.device.cpu import CpuCopier
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES, PIECE_BYTES, Header, seal
from kvtier.slab import layout as table
from kvtier.types import Outcome

LOAD, STORE = TransferKind.LOAD, TransferKind.STORE
DEGREES = (1, 2, 4, 8, 16)


class Group(NamedTuple):
    """Layers that are alike: rows of heads, a token each (NHD) or one for all tokens (HND)."""

    layers: int
    rows: int
    heads: int
    head_bytes: int


class Model(NamedTuple):
    """All of its KV cache: for each group layer, block, row, head, byte."""

    groups: Sequence[Group]
    blocks: int
    per_chunk: int

    def filled(self, seed: int) -> list[npt.NDArray[np.uint8]]:
        random = np.random.default_rng(seed)
        shapes = [(g.layers, self.blocks, g.rows, g.heads, g.head_bytes) for g in self.groups]
        return [random.integers(0, 256, shape, np.uint8) for shape in shapes]


class Rank:
    """One of an engine's ranks: its heads of every layer."""

    def __init__(self, model: Model, degree: int, rank: int) -> None:
        self.share = [
            slice(rank * (g.heads // degree), (rank + 1) * (g.heads // degree))
            for g in model.groups
        ]
        sizes = [g.rows * (g.heads // degree) * g.head_bytes for g in model.groups]
        self.pages = [
            np.zeros((group.layers, model.blocks, size), np.uint8)
            for group, size in zip(model.groups, sizes, strict=True)
        ]
        self.arrays = [layer for group in self.pages for layer in group]
        tensors = tuple(
            DeviceTensor(int(each.ctypes.data), *each.shape[:1], each.shape[1], each.shape[1])
            for each in self.arrays
        )
        refs, first = [], 0
        for group, size in zip(model.groups, sizes, strict=True):
            layers = range(first, first + group.layers)
            own = group.heads // degree
            refs.append(tuple(PageRef(at, size, own, group.head_bytes) for at in layers))
            first += group.layers
        self.layout = DeviceLayout(tensors, tuple(refs), model.per_chunk, rank, degree)

    def take(self, cache: list[npt.NDArray[np.uint8]]) -> None:
        for pages, whole, share in zip(self.pages, cache, self.share, strict=True):
            pages[:] = whole[:, :, :, share].reshape(pages.shape)

    def has(
        self,
        cache: list[npt.NDArray[np.uint8]],
        blocks: Sequence[int] | slice = slice(None),
        groups: slice = slice(None),
    ) -> bool:
        return all(
            (
                pages[:, blocks] == whole[:, blocks][:, :, :, share].reshape(pages[:, blocks].shape)
            ).all()
            for pages, whole, share in list(zip(self.pages, cache, self.share, strict=True))[groups]
        )

    def run(self, host: MemoryHost, job: CopyJob, copies: str = "cpu") -> CopyResult:
        records = RankRecords(self.layout, host, NAMESPACE)
        copier: DeviceCopier
        if copies == "cpu":
            copier = CpuCopier(records, self.arrays)
        else:
            copier = CudaCopier(records, FakeDevice(staging=3 * (copies == "staged")))
            assert copier.prepared.wait(60)
        try:
            copier.submit(job)
            copier.wait([job.id])
            while not (found := copier.poll()):
                time.sleep(0.001)
            return found[0]
        finally:
            copier.close()


def job_of(kind: TransferKind, model: Model, slots: Sequence[int] = ()) -> CopyJob:
    """All blocks of a model, each group's behind the last one's, as chunks of each of them."""
    chunks = model.blocks // model.per_chunk
    groups = [group for group in range(len(model.groups)) for _ in range(chunks)]
    ids = np.tile(np.arange(model.blocks), len(model.groups))
    count = len(model.groups)
    return CopyJob(
        id=1,
        kind=kind,
        keys=keys_of(len(groups), groups=groups),
        slots=slots or range(len(groups)),
        blocks=DeviceBlocks(ids, [model.blocks] * count, [0] * count),
        deadline=float("inf"),
    )


def write(model: Model, degree: int, cache: list[npt.NDArray[np.uint8]]) -> MemoryHost:
    """The records that so many ranks write: a part each, which has layer by layer the pages of a
    chunk's blocks."""
    job = job_of(STORE, model)
    host = MemoryHost(Rank(model, degree, 0).layout, len(job.keys))
    ranks = [Rank(model, degree, at) for at in range(degree)]
    for rank in ranks:
        rank.take(cache)
    chunks = model.blocks // model.per_chunk
    for slot, key in enumerate(job.keys):
        group, chunk = divmod(slot, chunks)
        blocks = slice(chunk * model.per_chunk, (chunk + 1) * model.per_chunk)
        payload = b"".join(rank.pages[group][:, blocks].tobytes() for rank in ranks)
        record = host.record(slot)
        record[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        seal(record, Header(key, NAMESPACE, len(payload), degree))
        host.put(slot, key, table.VALID)
    return host


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


@st.composite
def models(draw: Any, *degrees: int) -> Model:
    least = max(degrees)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        heads = least * draw(st.integers(1, 64 // least))
        by_tokens = draw(st.booleans())
        rows = draw(st.integers(1, 5)) if by_tokens else 1
        groups.append(
            Group(draw(st.integers(1, 3)), rows, heads, draw(st.sampled_from([1, 6, 64])))
        )
    per_chunk = draw(st.integers(1, 3))
    return Model(groups, per_chunk * draw(st.integers(1, 3)), per_chunk)


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
