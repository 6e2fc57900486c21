"""Kernels for the processor: the same pages and checksums as numpy and xxhash, or none at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.device.device_worlds import NAMESPACE, MemoryHost, keys_of
from support.device.ranks import DEGREES, LOAD, Group, Model, Rank, job_of, write

from kvtier.device import host_kernels
from kvtier.device.copier import CopyJob
from kvtier.device.cpu import _STRIP_BYTES as STRIP_BYTES
from kvtier.device.cpu import CpuCopier, PageCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.records import RankRecords, RecordParts
from kvtier.device.regroup import Regrouping
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import HEADER_BYTES, PIECE_BYTES, TAIL_BYTES, Header, part_sum, seal
from kvtier.slab import layout as table
from kvtier.types import Outcome

STRIPE, BLOCKS = 64, 8


@pytest.fixture(scope="module")
def kernels() -> host_kernels.Kernels:
    built = host_kernels.build()
    assert built is not None
    return built


@pytest.fixture(autouse=True)
def _built_anew() -> Iterator[None]:
    yield
    host_kernels.build.cache_clear()


class Tensors:
    """Pages of some bytes, at a place and a distance of their own."""

    def __init__(self, pages: list[int], per_chunk: int, *, shift: int = 0, gap: int = 0) -> None:
        size = BLOCKS * (sum(pages) + gap * len(pages)) + 2 * STRIPE
        room = np.zeros(size, np.uint8)
        self.memory = room[-int(room.ctypes.data) % STRIPE :][: size - STRIPE]
        self.memory[:] = np.arange(len(self.memory)) % 251
        at = shift
        self.arrays: list[npt.NDArray[np.uint8]] = []
        for page in pages:
            size = BLOCKS * (page + gap)
            self.arrays.append(self.memory[at : at + size].reshape(BLOCKS, page + gap)[:, :page])
            at += size
        tensors = tuple(
            DeviceTensor(int(array.ctypes.data), BLOCKS, array.strides[0], array.shape[1])
            for array in self.arrays
        )
        refs = tuple(PageRef(index, page) for index, page in enumerate(pages))
        self.layout = DeviceLayout(tensors, (refs,), per_chunk)

    def copier(self, kernels: host_kernels.Kernels | None) -> PageCopier:
        return PageCopier(self.layout, self.arrays, kernels)


def a_part(layout: DeviceLayout) -> npt.NDArray[np.uint8]:
    room = np.zeros(layout.part_bytes[0] + STRIPE, np.uint8)
    at = -int(room.ctypes.data) % STRIPE
    part = room[at : at + layout.part_bytes[0]]
    part[:] = np.random.default_rng(2).integers(0, 256, len(part), np.uint8)
    return part


def in_slots(*parts: npt.NDArray[np.uint8]) -> RecordParts:
    """Parts of slots whose distance is a multiple of a stripe."""
    room = np.zeros((len(parts), len(parts[0]) + 2 * STRIPE), np.uint8).ravel()
    at = -int(room.ctypes.data) % STRIPE
    width = len(parts[0]) // STRIPE * STRIPE + STRIPE
    rows = room[at : at + width * len(parts)].reshape(-1, width)[:, : len(parts[0])]
    rows[:] = parts
    return RecordParts(rows, np.arange(len(parts)))


def sums_of(parts: RecordParts) -> npt.NDArray[np.uint64]:
    return np.array([part_sum(part.tobytes()) for part in parts.of_slots], np.uint64)


def scattered(copier: PageCopier, places: npt.NDArray[np.int64], part: Any) -> int:
    """The checksum of one part, which is right."""
    parts = in_slots(part)
    return int(copier.scatter(0, places[None], parts, sums_of(parts))[0])


EDGES = [TAIL_BYTES, PIECE_BYTES, PIECE_BYTES + TAIL_BYTES, 2 * PIECE_BYTES + TAIL_BYTES]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_they_do_what_numpy_and_xxhash_do(kernels: host_kernels.Kernels, data: Any) -> None:
    per_chunk = data.draw(st.integers(1, 3))
    pages = data.draw(st.lists(st.integers(1, 40).map(STRIPE.__mul__), min_size=1, max_size=4))
    if data.draw(st.booleans()):  # so that a part or a piece ends there, or a stripe off
        edge = data.draw(st.sampled_from(EDGES)) + STRIPE * data.draw(st.integers(-1, 1))
        pages.append(max(STRIPE, edge // per_chunk // STRIPE * STRIPE - sum(pages)))
    gap = data.draw(st.sampled_from([0, STRIPE]))
    mine, plain = (Tensors(pages, per_chunk, gap=gap) for _ in range(2))
    part, expected = a_part(mine.layout), a_part(mine.layout)
    ids = data.draw(st.permutations(range(BLOCKS)))[:per_chunk]
    skip = data.draw(st.integers(0, per_chunk - 1))
    places = np.array([-1] * skip + ids[skip:])
    loaded = scattered(mine.copier(kernels), places, part)
    assert loaded == scattered(plain.copier(None), places, part)
    assert loaded == part_sum(part.data)
    assert (mine.memory == plain.memory).all()
    stored = mine.copier(kernels).gather(0, ids, part.data)
    assert stored == plain.copier(None).gather(0, ids, expected.data)
    assert (part == expected).all()


@pytest.mark.parametrize(
    ("pages", "shift", "gap"),
    [([4096, 100], 0, 0), ([4096], 16, 0), ([4096], 0, 8), ([64], 0, 0)],
    ids=["page", "address", "stride", "small"],
)
def test_what_does_not_lie_in_stripes_is_left_to_numpy(
    kernels: host_kernels.Kernels, pages: list[int], shift: int, gap: int
) -> None:
    tensors = Tensors(pages, 2, shift=shift, gap=gap)
    part, blocks = a_part(tensors.layout), np.array([1, 3])
    parts = in_slots(part)
    copies = host_kernels.OnePassCopies(kernels, tensors.layout, tensors.arrays)
    assert copies.load(0, blocks[None], parts, sums_of(parts), verified_first=True) is None
    assert scattered(tensors.copier(kernels), blocks, part) == part_sum(part.data)
    assert (tensors.arrays[0][[1, 3]].ravel() == part[: 2 * pages[0]]).all()


def test_a_part_that_is_short_or_askew_is_not_for_them(kernels: host_kernels.Kernels) -> None:
    tensors = Tensors([4096], 2)
    part, blocks = a_part(tensors.layout), np.array([[1, 3]])
    copies = host_kernels.OnePassCopies(kernels, tensors.layout, tensors.arrays)
    askew = np.zeros(len(part) + 1, np.uint8)[1:]
    for wrong in (part[:-STRIPE], askew):
        slots, stated = RecordParts(wrong[None], np.arange(1)), np.zeros(1, np.uint64)
        assert copies.load(0, blocks, slots, stated, verified_first=True) is None
        assert copies.store(0, [1, 3], wrong.data) is None
    assert copies.store(0, [1], part.data) is None, "a chunk with a hole"


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize(
    ("page", "copied"),
    [(4096, 1), (STRIP_BYTES // 2, 1), (STRIP_BYTES, 2), (PIECE_BYTES, 2)],
    ids=["small", "strip", "large", "pieces"],
)
def test_nothing_is_copied_after_what_is_wrong(
    kernels: host_kernels.Kernels, built: bool, page: int, copied: int
) -> None:
    """Nor is that itself, if it is small; the checksums of all are found nevertheless."""
    tensors = Tensors([page], 2)
    whole = a_part(tensors.layout)
    parts = in_slots(whole, whole[::-1], whole ^ 1)
    stated = sums_of(parts)
    parts.of_slots[1, -1] ^= 1
    blocks = np.array([[3, 0], [1, 4], [5, 2]])
    wanted = tensors.arrays[0].copy()
    for part, places in list(zip(parts.of_slots, blocks, strict=True))[:copied]:
        wanted[places] = part.reshape(2, page)
    found = tensors.copier(kernels if built else None).scatter(0, blocks, parts, stated)
    assert (found == sums_of(parts)).all()
    assert (found == stated).tolist() == [True, False, True]
    assert (tensors.arrays[0] == wanted).all()


def test_a_block_that_is_not_there_is_an_error(kernels: host_kernels.Kernels) -> None:
    tensors = Tensors([STRIPE * 4, TAIL_BYTES], 2)
    part = a_part(tensors.layout)
    with pytest.raises((IndexError, ValueError)):
        tensors.copier(kernels).gather(0, [0, BLOCKS], part.data)


@pytest.mark.parametrize("page", [4096, STRIP_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("at", [20, HEADER_BYTES, HEADER_BYTES + 2 * 4096 - 1])
def test_a_copier_loads_only_what_is_proved(page: int, at: int) -> None:
    """One bit has flipped in the third of four records; the large one is found out too late."""
    tensors = Tensors([page], 2)
    host, keys = MemoryHost(tensors.layout, 4), keys_of(4)
    for slot, key in enumerate(keys):
        record = host.record(slot)
        record[HEADER_BYTES:] = bytes([slot + 1]) * (2 * page)
        seal(record, Header(key, NAMESPACE, 2 * page))
        host.put(slot, key, table.VALID)
    host.record(2)[at] ^= 1
    copier = CpuCopier(RankRecords(tensors.layout, host, NAMESPACE), tensors.arrays, load_threads=1)
    assert copier._pages.one_pass
    blocks = DeviceBlocks(np.arange(8), [8], [0])
    slots, kind = list(range(4)), TransferKind.LOAD
    job = CopyJob(id=1, kind=kind, keys=keys, slots=slots, blocks=blocks, deadline=float("inf"))
    before = tensors.arrays[0].copy()
    copier.jobs.submit(job)
    copier.jobs.wait([1])
    (result,) = copier.jobs.poll()
    copier.close()
    ok, wrong, late = Outcome.OK, Outcome.CORRUPT, Outcome.CANCELLED
    assert result.outcomes == [ok, ok, wrong, late]
    pages = tensors.arrays[0]
    assert (pages[:4] == np.repeat([1, 2], 2)[:, None]).all()
    assert (pages[6:] == before[6:]).all()
    if page == 4096 or at < HEADER_BYTES:
        assert (pages[4:6] == before[4:6]).all()


@pytest.mark.parametrize("wrong", ["result", "error", "absence"])
def test_kernels_that_do_not_work_are_not_used(wrong: str, monkeypatch: Any) -> None:
    host_kernels.build.cache_clear()

    def build() -> host_kernels.Kernels:
        if wrong == "result":
            return host_kernels.Kernels(lambda *_: None, lambda *_: None, None)
        raise RuntimeError("no target") if wrong == "error" else ImportError("llvmlite")

    monkeypatch.setattr(host_kernels, "_build", build)
    assert host_kernels.build() is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_heads_of_other_ranks_go_to_their_pages_at_once(
    kernels: host_kernels.Kernels, data: Any
) -> None:
    """Small parts, large ones and those of several pieces, from where they lie; where a bit has
    flipped, and the rank takes heads of that part, the record is wrong, and no other."""
    writers, readers = (data.draw(st.sampled_from(DEGREES)) for _ in range(2))
    heads = max(writers, readers) * data.draw(st.integers(1, 3))
    size = data.draw(st.sampled_from([64, 576, STRIP_BYTES // 4, PIECE_BYTES // 8]))
    rows = 2 if size > STRIP_BYTES // 4 else data.draw(st.integers(1, 20))
    model = Model([Group(data.draw(st.integers(1, 2)), rows, heads, size)], 4, 2)
    rank = Rank(model, readers, data.draw(st.integers(0, readers - 1)))
    regrouping = Regrouping.of(rank.layout, 0, writers)
    assert regrouping is not None
    copies = host_kernels.OnePassCopies(kernels, rank.layout, rank.arrays)
    least = min(regrouping.source_bytes, rank.layout.part_bytes[0])
    assert copies.takes(0, regrouping) == (least >= TAIL_BYTES)
    cache, job = model.filled(data.draw(st.integers(0, 99))), job_of(LOAD, model)
    host = write(model, writers, cache)
    flipped = data.draw(st.none() | st.integers(0, writers - 1))
    if flipped is not None:
        host.record(0)[HEADER_BYTES + flipped * regrouping.source_bytes] ^= 1
    result = rank.run(host, job)
    if flipped not in regrouping.sources:
        assert result.ok
        assert rank.has(cache)
        return
    assert result.outcomes[0] is Outcome.CORRUPT
    assert result.outcomes[1] is Outcome.CANCELLED
    if regrouping.source_bytes <= STRIP_BYTES:
        first = flipped == regrouping.sources.start
        assert not first or not any(page.any() for page in rank.arrays), "nothing is copied"
