"""Kernels for the processor itself, which copy a record's part and take its checksum in one pass.

Neither numpy nor the C library writes past the caches below a hundred megabytes: so each byte that
they copy is also read where it is to go, and a checksum is one more pass. These kernels do neither.
They are built when an engine starts, by the LLVM that comes with vLLM (numba's), in 0.1 s, and
tried before any block is trusted to them. Without it numpy and xxhash do the work.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.records.record import (
    PIECE_BYTES,
    TAIL_BYTES,
    Buffer,
    part_sum,
    pieces_of,
    sum_of,
)
from kvtier.device.accelerator import ERRORS
from kvtier.device.host_kernel_code import STRIPE, code
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

_NUMBERS = (ctypes.c_void_p,) * 4 + (ctypes.c_int64, ctypes.c_void_p) + (ctypes.c_int64,) * 2
_KERNEL = ctypes.CFUNCTYPE(None, *_NUMBERS, ctypes.c_void_p)  # gives Python's lock away meanwhile


class Kernels(NamedTuple):
    """What was built, and what it lives in."""

    load: Callable[..., None]
    store: Callable[..., None]
    engine: Any


class _Group(NamedTuple):
    """The references of a cache group, as kernels read them."""

    tables: Ints
    """Where their pages begin, how far apart these are, and how many stripes each has."""
    addresses: tuple[int, ...]
    """Of these three, and how many references they are of."""
    part_bytes: int
    pages: int
    """So many has each of them: kernels check no number of a block."""


class OnePassCopies:
    """Copies between the pages of KV tensors and a rank's part of a record."""

    def __init__(self, kernels: Kernels, layout: DeviceLayout, arrays: Sequence[Bytes]) -> None:
        self._kernels = kernels
        self._keep = arrays
        self._per_chunk = layout.blocks_per_chunk
        self._groups = [
            _group(layout, group, arrays, size) for group, size in enumerate(layout.part_bytes)
        ]

    def load(self, group: int, ids: Sequence[int], skip: int, part: Buffer) -> int | None:
        """Copy a part's blocks from `skip` on to these of the device, and answer with the checksum
        of the whole part; None if this part is not for these kernels."""
        blocks = np.full(self._per_chunk, -1, np.int64)
        blocks[skip : skip + len(ids)] = ids
        return self._run(self._kernels.load, group, blocks, part)

    def store(self, group: int, ids: Sequence[int], part: Buffer) -> int | None:
        """Copy a whole chunk's blocks to their places in a part; likewise."""
        if len(ids) != self._per_chunk:
            return None
        return self._run(self._kernels.store, group, np.array(ids, np.int64), part)

    def _run(
        self, kernel: Callable[..., None], group: int, blocks: Ints, part: Buffer
    ) -> int | None:
        _, addresses, size, pages = self._groups[group]
        if not size or len(part) != size or blocks.max() >= pages:
            return None
        at = _address(np.frombuffer(part, np.uint8))
        if at % STRIPE:
            return None
        sums = np.empty(pieces_of(size), np.uint64)
        stripes = size // STRIPE
        kernel(at, *addresses, _address(blocks), len(blocks), stripes, _address(sums))
        return sum_of(sums.tolist())


def _group(layout: DeviceLayout, group: int, arrays: Sequence[Bytes], part_bytes: int) -> _Group:
    """A group for the kernels: of no bytes if its pages do not begin and end at whole stripes."""
    refs = layout.groups[group]
    of_ref = [arrays[ref.tensor] for ref in refs]
    tables = np.array(
        [
            [_address(array) for array in of_ref],
            [array.strides[0] for array in of_ref],
            [ref.page_bytes for ref in refs],
        ],
        np.int64,
    )
    fits = part_bytes >= TAIL_BYTES and not (tables % STRIPE).any()
    tables[2] //= STRIPE
    addresses = (*map(_address, tables), len(refs))
    pages = min(map(len, of_ref), default=0)
    return _Group(tables, addresses, part_bytes if fits else 0, pages)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@functools.cache
def build() -> Kernels | None:
    """The kernels of this process; None if there is nothing that builds them, or builds them
    right."""
    if sys.byteorder != "little":
        return None
    try:
        kernels = _build()
        if _tried(kernels):
            return kernels
        logger.warning("the kernels built for this processor copy wrong: numpy copies instead")
    except ImportError:
        logger.debug("no kernels for this processor: there is no llvmlite")
    except ERRORS as error:
        logger.info("no kernels for this processor, numpy copies instead: %s", error)
    return None


def _build() -> Kernels:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(code("kvtier_load", "kvtier_store"))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    load, store = (
        _KERNEL(engine.get_function_address(name)) for name in ("kvtier_load", "kvtier_store")
    )
    return Kernels(load, store, engine)


def _tried(kernels: Kernels) -> bool:
    """Whether they do with a part of two pieces what numpy and xxhash do."""
    blocks, pages = 4, (3 * STRIPE, PIECE_BYTES // 2 + TAIL_BYTES)
    dice = np.random.default_rng(0)
    arrays = [_aligned(blocks * page).reshape(blocks, page) for page in pages]
    for array in arrays:
        array[:] = dice.integers(0, 256, array.shape, np.uint8)
    tensors = tuple(
        DeviceTensor(int(array.ctypes.data), blocks, page, page)
        for array, page in zip(arrays, pages, strict=True)
    )
    layout = DeviceLayout(tensors, (tuple(PageRef(i, page) for i, page in enumerate(pages)),), 2)
    copies = OnePassCopies(kernels, layout, arrays)
    part = _aligned(layout.part_bytes[0])
    stored = copies.store(0, [3, 1], part.data)
    expected = np.concatenate([array[[3, 1]].ravel() for array in arrays])
    right = (part == expected).all() and stored == part_sum(part.data)
    part[:] = dice.integers(0, 256, len(part), np.uint8)
    before = [array.copy() for array in arrays]
    loaded = copies.load(0, [2], 1, part.data)
    at = 0
    for array, page in zip(before, pages, strict=True):
        array[2] = part[at + page : at + 2 * page]
        at += 2 * page
    same = all((a == b).all() for a, b in zip(arrays, before, strict=True))
    return bool(right and same and loaded == part_sum(part.data))


def _aligned(size: int) -> Bytes:
    room = np.zeros(size + STRIPE, np.uint8)
    first = -int(room.ctypes.data) % STRIPE
    return room[first : first + size]
