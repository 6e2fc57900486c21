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
from kvtier.device.load_proofs import Parts

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_PAGES = (_ADDRESS,) * 3 + (_NUMBER, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS)
# Both give Python's lock away meanwhile.
_STORE = ctypes.CFUNCTYPE(None, _ADDRESS, *_PAGES)
_LOAD = ctypes.CFUNCTYPE(None, _NUMBER, _ADDRESS, _ADDRESS, _NUMBER, *_PAGES)


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

    def load(
        self, group: int, blocks: Ints, parts: Parts, stated: Sums, *, proved_first: bool
    ) -> Sums | None:
        """Copy records' parts to these blocks of the device, a row of blocks each, and answer with
        the checksums of all of them, as `PageCopier.scatter` does; None if these kernels are not
        for these parts."""
        of_group = self._groups[group]
        size = of_group.part_bytes
        if not size or parts.of_slots.shape[1] != size or blocks.max() >= of_group.pages:
            return None
        at = _address(parts.of_slots) + parts.slots * parts.of_slots.strides[0]
        if (at % STRIPE).any():
            return None
        pieces = pieces_of(size)
        if pieces == 1:
            return self._load(of_group, blocks, at, stated, proved_first)
        found = np.empty_like(stated)
        for row in range(len(at)):
            one = slice(row, row + 1)
            wrong = (found[:row] != stated[:row]).any()
            here = np.full_like(blocks[one], -1) if wrong else blocks[one]
            found[row] = sum_of(self._load(of_group, here, at[one], stated[one], False).tolist())
        return found

    def _load(
        self, group: _Group, blocks: Ints, at: Ints, stated: Sums, proved_first: bool
    ) -> Sums:
        """Parts of one piece, or one part of several: the checksums of all their pieces."""
        blocks, stated = np.ascontiguousarray(blocks), np.ascontiguousarray(stated)
        sums = np.empty(len(at) * pieces_of(group.part_bytes), np.uint64)
        self._kernels.load(
            len(at),
            _address(at),
            _address(stated),
            proved_first,
            *group.addresses,
            _address(blocks),
            self._per_chunk,
            group.part_bytes // STRIPE,
            _address(sums),
        )
        return sums

    def store(self, group: int, ids: Sequence[int], part: Buffer) -> int | None:
        """Copy a whole chunk's blocks to their places in a part, and answer with its checksum;
        likewise."""
        _, addresses, size, pages = self._groups[group]
        blocks = np.array(ids, np.int64)
        if not size or len(part) != size or len(ids) != self._per_chunk or blocks.max() >= pages:
            return None
        at = _address(np.frombuffer(part, np.uint8))
        if at % STRIPE:
            return None
        sums = np.empty(pieces_of(size), np.uint64)
        of_part = size // STRIPE
        self._kernels.store(at, *addresses, _address(blocks), len(blocks), of_part, _address(sums))
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
    load, store = map(engine.get_function_address, ("kvtier_load", "kvtier_store"))
    return Kernels(_LOAD(load), _STORE(store), engine)


def _tried(kernels: Kernels) -> bool:
    """Whether they do what numpy and xxhash do, with parts of two pieces and of one."""
    large, small = (3 * STRIPE, PIECE_BYTES // 2 + TAIL_BYTES), (3 * STRIPE, TAIL_BYTES)
    return all(
        _agree(kernels, pages, proved_first)
        for pages, proved_first in ((large, False), (small, False), (small, True))
    )


def _agree(kernels: Kernels, pages: tuple[int, ...], proved_first: bool) -> bool:
    """Whether they store a part, and load one that is right, one that is not, and none after it."""
    dice = np.random.default_rng(0)
    arrays = [_aligned(8 * page).reshape(8, page) for page in pages]
    parts = _aligned(3 * 2 * sum(pages)).reshape(3, -1)
    for array in (*arrays, parts):
        array[:] = dice.integers(0, 256, array.shape, np.uint8)
    tensors = tuple(
        DeviceTensor(int(array.ctypes.data), 8, page, page)
        for array, page in zip(arrays, pages, strict=True)
    )
    layout = DeviceLayout(tensors, (tuple(PageRef(i, page) for i, page in enumerate(pages)),), 2)
    copies = OnePassCopies(kernels, layout, arrays)
    stored = copies.store(0, [3, 1], parts[0].data)
    expected = np.concatenate([array[[3, 1]].ravel() for array in arrays])
    right = (parts[0] == expected).all() and stored == part_sum(parts[0].data)
    blocks = np.array([[-1, 2], [0, 5], [4, 6]])
    sums = np.array([part_sum(part.data) for part in parts], np.uint64)
    stated = sums ^ np.array([0, 1, 0], np.uint64)
    wanted = [array.copy() for array in arrays]
    of_slots = Parts(parts, np.arange(3))
    found = copies.load(0, blocks, of_slots, stated, proved_first=proved_first)
    for part, places in list(zip(parts, blocks, strict=True))[: 1 if proved_first else 2]:
        at = 0
        for array, page in zip(wanted, pages, strict=True):
            here = places >= 0
            array[places[here]] = part[at : at + 2 * page].reshape(2, page)[here]
            at += 2 * page
    same = all((array == want).all() for array, want in zip(arrays, wanted, strict=True))
    return bool(right and same and found is not None and (found == sums).all())


def _aligned(size: int) -> Bytes:
    room = np.zeros(size + STRIPE, np.uint8)
    first = -int(room.ctypes.data) % STRIPE
    return room[first : first + size]
