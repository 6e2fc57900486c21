"""Copies between pages and a record's part that take its checksum in the same pass, built for this
processor.

`OnePassCopies` calls two functions, which `code` writes in LLVM's language. A stripe is 64 bytes.
Each is read once, written past the processor's caches, and added to the xxh3 checksum of its piece
of the part; the sums of the pieces are written one behind the other.

    void store(void *part, int64 *bases, int64 *strides, int64 *stripes, int64 references,
               int64 *blocks, int64 blocks_of_a_chunk, int64 stripes_of_the_part, uint64 *sums)

A reference's pages lie at `bases + block * strides`, and have so many `stripes`. A negative block
is not copied, nor is a reference with a negative base: their stripes are only added up.

    void load(int64 records, void **parts, uint64 *stated, int64 verified_first, int64 bases_apart,
              ...)

A load takes many records, with so many blocks and one sum each, and otherwise the same. Each has
the bases of the first, or its own, so many numbers behind those of the last one. It copies nothing
more once a sum is not the stated one: the rest is only added up. If they are to be verified first,
each is added up before it is copied, and copied only if it is right; that is for parts that stay in
a processor's cache meanwhile. Parts of several pieces have several sums, and nobody states those:
they are loaded one by one.

A part that another number of ranks has written is runs of bytes (`Regrouping.runs`), which are
references of one block each.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from textwrap import dedent
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvtier.device.copier import ERRORS
from kvtier.device.layout import Bytes, DeviceLayout, DeviceTensor, Ints, PageRef
from kvtier.device.records import Flags, OtherRecords, RecordParts, Sums, up_to_wrong
from kvtier.device.regroup import Regrouping
from kvtier.record.record import PIECE_BYTES, TAIL_BYTES, Buffer, part_sum, pieces_of, sum_of

logger = logging.getLogger(__name__)

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
SCRAMBLE_AT, LAST_AT, END_AT = 128, 121, 11
"""Where the secret of xxh3 begins as scrambling, the last stripe and the end see it; kernels of a
GPU use these numbers, too."""

STRIPE = 64
_PRIME = 0x9E3779B1
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_PAGES = (_ADDRESS,) * 3 + (_NUMBER, _ADDRESS, _NUMBER, _NUMBER, _ADDRESS)
# Both give the GIL away meanwhile.
_STORE = ctypes.CFUNCTYPE(None, _ADDRESS, *_PAGES)
_LOAD = ctypes.CFUNCTYPE(None, _NUMBER, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER, *_PAGES)


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


class _Walk(NamedTuple):
    """What of a batch of parts goes where, as `load` reads it."""

    bases: Ints
    """For all records, or for each."""
    strides: Ints
    stripes: Ints
    blocks: Ints
    part_bytes: int

    @classmethod
    def of_runs(cls, places: Ints, sizes: Ints) -> Self:
        """Runs of bytes, which go to these places in each record, -1 for nowhere."""
        blocks = np.zeros((len(places), 1), np.int64)
        return cls(places, np.zeros_like(sizes), sizes // STRIPE, blocks, int(sizes.sum()))

    def only(self, row: int, inside: bool) -> _Walk:
        """One of the records, copied or not."""
        bases = self.bases[row : row + 1] if len(self.bases) > 1 else self.bases
        blocks = self.blocks[row : row + 1]
        return self._replace(bases=bases, blocks=blocks if inside else np.full_like(blocks, -1))


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
        self, group: int, blocks: Ints, parts: RecordParts, stated: Sums, *, verified_first: bool
    ) -> Sums | None:
        """Copy records' parts to these blocks of the device, a row of blocks each, and answer with
        the checksums of all of them, as `PageCopier.scatter` does; None if these kernels are not
        for these parts."""
        of_group = self._groups[group]
        size = of_group.part_bytes
        if not size or parts.of_slots.shape[1] != size or blocks.max() >= of_group.pages:
            return None
        at = parts.addresses
        if (at % STRIPE).any():
            return None
        bases, strides, stripes = of_group.tables
        walk = _Walk(bases[None], strides, stripes, blocks, size)
        return self.load_all(walk, at, stated, verified_first)

    def takes(self, group: int, regrouping: Regrouping) -> bool:
        """Whether `load_others` is for such parts: all runs of bytes in them are stripes."""
        short, askew = regrouping.source_bytes < TAIL_BYTES, regrouping.head_bytes % STRIPE
        return bool(self._groups[group].part_bytes) and not (short or askew)

    def load_others(
        self,
        group: int,
        blocks: Ints,
        others: OtherRecords,
        *,
        verified_first: bool,
    ) -> Flags:
        """Copy those heads of other ranks' parts that are this rank's; which records are right."""
        right, pages = np.ones(len(blocks), np.bool_), self.pages(group, blocks)
        for at, part in enumerate(others.regrouping.sources):
            pages[~up_to_wrong(right, failed=False)] = -1
            walk = _Walk.of_runs(*others.regrouping.runs(part, pages))
            stated = others.stated[:, at]
            found = self.load_all(walk, others.source(part).addresses, stated, verified_first)
            right &= found == stated
        return right

    def pages(self, group: int, blocks: Ints) -> Ints:
        """Where the pages of records' blocks lie (record, reference, block), -1 for nowhere."""
        bases, strides, _ = self._groups[group].tables[:, :, None]
        blocks = blocks[:, None]
        return np.where(blocks >= 0, bases + strides * blocks, -1)

    def load_all(self, walk: _Walk, at: Ints, stated: Sums, verified_first: bool) -> Sums:
        """Parts that lie at these addresses; the checksums of all of them."""
        if pieces_of(walk.part_bytes) == 1:
            return self._load(walk, at, stated, verified_first)
        found = np.empty_like(stated)
        for row in range(len(at)):
            one, right = slice(row, row + 1), not (found[:row] != stated[:row]).any()
            sums = self._load(walk.only(row, right), at[one], stated[one], False)
            found[row] = sum_of(sums.tolist())
        return found

    def _load(self, walk: _Walk, at: Ints, stated: Sums, verified_first: bool) -> Sums:
        """Parts of one piece, or one part of several: the checksums of all their pieces."""
        blocks, stated = np.ascontiguousarray(walk.blocks), np.ascontiguousarray(stated)
        sums = np.empty(len(at) * pieces_of(walk.part_bytes), np.uint64)
        references = len(walk.stripes)
        self._kernels.load(
            len(at),
            _address(at),
            _address(stated),
            verified_first,
            references if len(walk.bases) > 1 else 0,
            _address(walk.bases),
            _address(walk.strides),
            _address(walk.stripes),
            references,
            _address(blocks),
            blocks.shape[1],
            walk.part_bytes // STRIPE,
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
        _agree(kernels, pages, verified_first)
        for pages, verified_first in ((large, False), (small, False), (small, True))
    )


def _agree(kernels: Kernels, pages: tuple[int, ...], verified_first: bool) -> bool:
    """Whether they store a part, and load one that is right, one that is not, and none after it, by
    blocks and by runs of bytes."""
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
    wanted, before = ([array.copy() for array in arrays] for _ in range(2))
    for part, places in list(zip(parts, blocks, strict=True))[: 1 if verified_first else 2]:
        at = 0
        for array, page in zip(wanted, pages, strict=True):
            here = places >= 0
            array[places[here]] = part[at : at + 2 * page].reshape(2, page)[here]
            at += 2 * page
    of_slots = RecordParts(parts, np.arange(3))
    runs = _Walk.of_runs(copies.pages(0, blocks).reshape(3, -1), np.repeat(pages, 2))
    loads: Sequence[Callable[[], Sums | None]] = (
        lambda: copies.load(0, blocks, of_slots, stated, verified_first=verified_first),
        lambda: copies.load_all(runs, of_slots.addresses, stated, verified_first),
    )
    for load in loads:
        for array, was in zip(arrays, before, strict=True):
            array[:] = was
        found = load()
        right &= found is not None and bool((found == sums).all())
        right &= all((array == want).all() for array, want in zip(arrays, wanted, strict=True))
    return bool(right)


def _aligned(size: int) -> Bytes:
    room = np.zeros(size + STRIPE, np.uint8)
    first = -int(room.ctypes.data) % STRIPE
    return room[first : first + size]


def code(load: str, store: str) -> str:
    """A module of two functions with these names."""
    secret = ", ".join(f"i8 {byte}" for byte in SECRET)
    return "\n".join(
        [
            f"@secret = private constant [{len(SECRET)} x i8] [{secret}]",
            _function(f"internal void @{load}_one", "%host", "%page", _FETCH),
            _function(f"void @{store}", "%page", "%host"),
            dedent(_HOST_KERNEL_CODE_LOAD).format(name=load),
            "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
            "!0 = !{i32 1}",
        ]
    )


def _function(name: str, source: str, target: str, fetch: str = "") -> str:
    head = f"""
        define {name}(ptr %part, ptr %bases, ptr %strides, ptr %stripes, i64 %references,
                      ptr %blocks, i64 %per_chunk, i64 %total, ptr %sums) {{
        """
    return "\n".join(map(dedent, [head, _WALK, _stripe(source, target, fetch), _FINISH, _NEXT]))


def _vector(values: Sequence[int]) -> str:
    return "<" + ", ".join(f"i64 {_signed(value)}" for value in values) + ">"


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_WALK = f"""
    entry:
      %piece_at = alloca i64
      %rest_at = alloca i64
      %sum_at = alloca ptr
      %one = icmp ult i64 %total, {(PIECE_BYTES + TAIL_BYTES) // STRIPE}
      %first = select i1 %one, i64 %total, i64 {PIECE_BYTES // STRIPE}
      store i64 %first, ptr %piece_at
      store i64 %total, ptr %rest_at
      store ptr %sums, ptr %sum_at
      br label %next_page
    next_page:
      %reference = phi i64 [ 0, %entry ], [ %reference_next, %page_end ]
      %place = phi i64 [ 0, %entry ], [ %place_next, %page_end ]
      %host_first = phi ptr [ %part, %entry ], [ %host_next, %page_end ]
      %sum_first = phi <8 x i64> [ {_vector(START)}, %entry ], [ %sum_next, %page_end ]
      %step_first = phi i64 [ 0, %entry ], [ %step_next, %page_end ]
      %left_first = phi i64 [ %first, %entry ], [ %left_next, %page_end ]
      %base_at = getelementptr i64, ptr %bases, i64 %reference
      %base = load i64, ptr %base_at
      %stride_at = getelementptr i64, ptr %strides, i64 %reference
      %stride = load i64, ptr %stride_at
      %count_at = getelementptr i64, ptr %stripes, i64 %reference
      %count = load i64, ptr %count_at
      %block_at = getelementptr i64, ptr %blocks, i64 %place
      %block = load i64, ptr %block_at
      %nowhere = or i64 %block, %base
      %copied = icmp sge i64 %nowhere, 0
      %offset = mul i64 %block, %stride
      %address = add i64 %base, %offset
      %page_first = inttoptr i64 %address to ptr
      br label %stripe
    """


_AHEAD = 4096
"""So far ahead of what is added up is fetched: the processor itself does not look beyond a page of
its memory. What lies behind the last part is not read by that."""
_FETCH = f"""
      %far = getelementptr i8, ptr %host, i64 {_AHEAD}
      call void @llvm.prefetch.p0(ptr %far, i32 0, i32 2, i32 1)"""


def _stripe(source: str, target: str, fetch: str) -> str:
    return f"""
    stripe:
      %host = phi ptr [ %host_first, %next_page ], [ %host_next, %next ]
      %page = phi ptr [ %page_first, %next_page ], [ %page_next, %next ]
      %todo = phi i64 [ %count, %next_page ], [ %todo_next, %next ]
      %sum = phi <8 x i64> [ %sum_first, %next_page ], [ %sum_next, %next ]
      %step = phi i64 [ %step_first, %next_page ], [ %step_next, %next ]
      %left = phi i64 [ %left_first, %next_page ], [ %left_next, %next ]
      {fetch}
      %value = load <8 x i64>, ptr {source}, align 1
      br i1 %copied, label %copy, label %add
    copy:
      store <8 x i64> %value, ptr {target}, align {STRIPE}, !nontemporal !0
      br label %add
    add:
      %last = icmp eq i64 %left, 1
      %along = shl i64 %step, 3
      %secret_from = select i1 %last, i64 {LAST_AT}, i64 %along
      %key_at = getelementptr i8, ptr @secret, i64 %secret_from
      %key = load <8 x i64>, ptr %key_at, align 1
      %keyed = xor <8 x i64> %value, %key
      %low = and <8 x i64> %keyed, {_vector([0xFFFFFFFF] * 8)}
      %high = lshr <8 x i64> %keyed, {_vector([32] * 8)}
      %product = mul <8 x i64> %low, %high
      %swapped = shufflevector <8 x i64> %value, <8 x i64> poison, {_SWAP}
      %sum_swapped = add <8 x i64> %sum, %swapped
      %sum_added = add <8 x i64> %sum_swapped, %product
      %step_added = add i64 %step, 1
      %left_added = sub i64 %left, 1
      br i1 %last, label %finish, label %more
    more:
      %full = icmp eq i64 %step_added, 16
      br i1 %full, label %scramble, label %next
    scramble:
      %scramble_at = getelementptr i8, ptr @secret, i64 {SCRAMBLE_AT}
      %scramble_key = load <8 x i64>, ptr %scramble_at, align 1
      %top = lshr <8 x i64> %sum_added, {_vector([47] * 8)}
      %folded = xor <8 x i64> %sum_added, %top
      %locked = xor <8 x i64> %folded, %scramble_key
      %scrambled = mul <8 x i64> %locked, {_vector([_PRIME] * 8)}
      br label %next
    """


_SWAP = "<8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>"


def _pair(index: int) -> str:
    return f"""
      %even{index} = extractelement <8 x i64> %ended, i32 {2 * index}
      %odd{index} = extractelement <8 x i64> %ended, i32 {2 * index + 1}
      %even_wide{index} = zext i64 %even{index} to i128
      %odd_wide{index} = zext i64 %odd{index} to i128
      %wide{index} = mul i128 %even_wide{index}, %odd_wide{index}
      %upper{index} = lshr i128 %wide{index}, 64
      %both{index} = xor i128 %wide{index}, %upper{index}
      %narrow{index} = trunc i128 %both{index} to i64
      %digest{index + 1} = add i64 %digest{index}, %narrow{index}"""


_FINISH = f"""
    finish:
      %end_at = getelementptr i8, ptr @secret, i64 {END_AT}
      %end_key = load <8 x i64>, ptr %end_at, align 1
      %ended = xor <8 x i64> %sum_added, %end_key
      %piece = load i64, ptr %piece_at
      %piece_bytes = mul i64 %piece, {STRIPE}
      %digest0 = mul i64 %piece_bytes, {_signed(START[1])}
      {"".join(map(_pair, range(4)))}
      %shifted = lshr i64 %digest4, 37
      %mixed = xor i64 %digest4, %shifted
      %spread = mul i64 %mixed, {0x165667919E3779F9}
      %spread_top = lshr i64 %spread, 32
      %digest = xor i64 %spread, %spread_top
      %to = load ptr, ptr %sum_at
      store i64 %digest, ptr %to
      %to_next = getelementptr i64, ptr %to, i64 1
      store ptr %to_next, ptr %sum_at
      %rest = load i64, ptr %rest_at
      %rest_next = sub i64 %rest, %piece
      store i64 %rest_next, ptr %rest_at
      %final = icmp ult i64 %rest_next, {(PIECE_BYTES + TAIL_BYTES) // STRIPE}
      %piece_next = select i1 %final, i64 %rest_next, i64 {PIECE_BYTES // STRIPE}
      store i64 %piece_next, ptr %piece_at
      br label %next
    """
# What was written past the caches is there for others before the function returns.
_NEXT = f"""
    next:
      %sum_next = phi <8 x i64> [ %sum_added, %more ], [ %scrambled, %scramble ],
                                [ {_vector(START)}, %finish ]
      %step_next = phi i64 [ %step_added, %more ], [ 0, %scramble ], [ 0, %finish ]
      %left_next = phi i64 [ %left_added, %more ], [ %left_added, %scramble ],
                           [ %piece_next, %finish ]
      %host_next = getelementptr i8, ptr %host, i64 {STRIPE}
      %page_next = getelementptr i8, ptr %page, i64 {STRIPE}
      %todo_next = sub i64 %todo, 1
      %page_done = icmp eq i64 %todo_next, 0
      br i1 %page_done, label %page_end, label %stripe
    page_end:
      %place_added = add i64 %place, 1
      %chunk_done = icmp eq i64 %place_added, %per_chunk
      %place_next = select i1 %chunk_done, i64 0, i64 %place_added
      %reference_added = add i64 %reference, 1
      %reference_next = select i1 %chunk_done, i64 %reference_added, i64 %reference
      %done = icmp eq i64 %reference_next, %references
      br i1 %done, label %end, label %next_page
    end:
      fence seq_cst
      ret void
    }}
    """
_HOST_KERNEL_CODE_LOAD = """
    define void @{name}(i64 %records, ptr %parts, ptr %stated, i64 %verified_first,
                        i64 %bases_apart, ptr %bases, ptr %strides, ptr %stripes, i64 %references,
                        ptr %blocks, i64 %per_chunk, i64 %total, ptr %sums) {{
    entry:
      %whole = alloca i64
      store i64 %total, ptr %whole
      %nowhere = alloca i64
      store i64 -1, ptr %nowhere
      %in_one_pass = icmp eq i64 %verified_first, 0
      %in_two = xor i1 %in_one_pass, true
      br label %record
    record:
      %index = phi i64 [ 0, %entry ], [ %index_next, %next ]
      %all_right = phi i1 [ true, %entry ], [ %still_right, %next ]
      %part_at = getelementptr ptr, ptr %parts, i64 %index
      %part = load ptr, ptr %part_at
      %sum_at = getelementptr i64, ptr %sums, i64 %index
      %place = mul i64 %index, %per_chunk
      %ids = getelementptr i64, ptr %blocks, i64 %place
      %apart = mul i64 %index, %bases_apart
      %own_bases = getelementptr i64, ptr %bases, i64 %apart
      %at_once = and i1 %all_right, %in_one_pass
      br i1 %at_once, label %copy_and_add, label %add
    copy_and_add:
      call void @{name}_one(ptr %part, ptr %own_bases, ptr %strides, ptr %stripes, i64 %references,
                            ptr %ids, i64 %per_chunk, i64 %total, ptr %sum_at)
      br label %compare
    add:
      call void @{name}_one(ptr %part, ptr %nowhere, ptr %nowhere, ptr %whole, i64 1,
                            ptr %nowhere, i64 1, i64 %total, ptr %sum_at)
      br label %compare
    compare:
      %stated_at = getelementptr i64, ptr %stated, i64 %index
      %expected = load i64, ptr %stated_at
      %found = load i64, ptr %sum_at
      %right = icmp eq i64 %found, %expected
      %still_right = and i1 %all_right, %right
      %verified = and i1 %still_right, %in_two
      br i1 %verified, label %copy, label %next
    copy:
      call void @{name}_one(ptr %part, ptr %own_bases, ptr %strides, ptr %stripes, i64 %references,
                            ptr %ids, i64 %per_chunk, i64 %total, ptr %sum_at)
      br label %next
    next:
      %index_next = add i64 %index, 1
      %done = icmp eq i64 %index_next, %records
      br i1 %done, label %end, label %record
    end:
      ret void
    }}
    """
