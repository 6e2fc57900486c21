"""Ranks of engines of every size, and what they write, by the obvious walk over heads."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvtier.device.copier import CopyJob, CopyResult
from kvtier.device.cpu import CpuCopier
from kvtier.device.cuda.copier import CudaCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.queue import DeviceCopier
from kvtier.device.records import RankRecords
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES, Header, seal
from kvtier.slab import layout as table
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of
from support.device.fake_device import FakeDevice

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
            _aligned(group.layers, model.blocks, size)
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
            copier.jobs.submit(job)
            copier.jobs.wait([job.id])
            while not (found := copier.jobs.poll()):
                time.sleep(0.001)
            return found[0]
        finally:
            copier.close()


def _aligned(*shape: int) -> npt.NDArray[np.uint8]:
    """As torch aligns tensors."""
    size = math.prod(shape)
    room = np.zeros(size + 64, np.uint8)
    return room[-int(room.ctypes.data) % 64 :][:size].reshape(shape)


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
