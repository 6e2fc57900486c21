"""Kernels for the processor: the same pages and checksums as numpy and xxhash, or none at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.records.record import PIECE_BYTES, TAIL_BYTES, part_sum
from kvtier.device import host_kernels
from kvtier.device.cpu_copier import PageCopier
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef

STRIPE, BLOCKS = 64, 6


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
    loaded = mine.copier(kernels).scatter(0, ids[skip:], skip, part.data)
    assert loaded == plain.copier(None).scatter(0, ids[skip:], skip, part.data)
    assert loaded == part_sum(part.data)
    assert (mine.memory == plain.memory).all()
    stored = mine.copier(kernels).gather(0, ids, 0, part.data)
    assert stored == plain.copier(None).gather(0, ids, 0, expected.data)
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
    part = a_part(tensors.layout)
    copies = host_kernels.OnePassCopies(kernels, tensors.layout, tensors.arrays)
    assert copies.load(0, [1, 3], 0, part.data) is None
    found = tensors.copier(kernels).scatter(0, [1, 3], 0, part.data)
    assert found == part_sum(part.data)
    assert (tensors.arrays[0][[1, 3]].ravel() == part[: 2 * pages[0]]).all()


def test_a_part_that_is_short_or_askew_is_not_for_them(kernels: host_kernels.Kernels) -> None:
    tensors = Tensors([4096], 2)
    copies = host_kernels.OnePassCopies(kernels, tensors.layout, tensors.arrays)
    part = a_part(tensors.layout)
    assert copies.load(0, [1, 3], 0, part[:-STRIPE].data) is None
    assert copies.load(0, [1, 3], 0, np.zeros(len(part) + 1, np.uint8)[1:].data) is None
    assert copies.store(0, [1], part.data) is None, "a chunk with a hole"


def test_a_block_that_is_not_there_is_an_error(kernels: host_kernels.Kernels) -> None:
    tensors = Tensors([STRIPE * 4, TAIL_BYTES], 2)
    part = a_part(tensors.layout)
    with pytest.raises((IndexError, ValueError)):
        tensors.copier(kernels).gather(0, [0, BLOCKS], 0, part.data)


@pytest.mark.parametrize("wrong", ["result", "error", "absence"])
def test_kernels_that_do_not_work_are_not_used(wrong: str, monkeypatch: Any) -> None:
    host_kernels.build.cache_clear()

    def build() -> host_kernels.Kernels:
        if wrong == "result":
            return host_kernels.Kernels(lambda *_: None, lambda *_: None, None)
        raise RuntimeError("no target") if wrong == "error" else ImportError("llvmlite")

    monkeypatch.setattr(host_kernels, "_build", build)
    assert host_kernels.build() is None
