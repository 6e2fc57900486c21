"""Triton kernels between an engine's pages and a staging buffer, and for the checksums in it.

The checksum is the record's: xxh3 with 64 bits and no seed, of every piece of a part. That adds up
blocks of 1 KiB, which is done for all of them at once, and then goes through these sums one after
the other, which is done for all pieces at once.
"""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from kvtier.core.record import PIECE_BYTES, TAIL_BYTES, pieces_of
from kvtier.device import accelerator

ERRORS = (
    *accelerator.ERRORS,
    AssertionError,
    ImportError,
    subprocess.SubprocessError,
    triton.errors.TritonError,
)
"""What building or launching a kernel may raise: no compiler, no driver, too old a device, a folder
from which nothing may be executed, another Triton than expected."""

building = threading.Lock()
"""Held by whoever may have to build kernels: Triton says nothing of doing so in several threads."""

PROGRAMS = 16
"""Multiprocessors' worth of threads: few, kept busy, because the model wants them, too."""
SMALLEST_PART = 256
"""Of shorter parts xxh3 is another function."""
WORD_BYTES = 8
"""Kernels move and add up whole words."""
_WORDS = 8192
"""What a multiprocessor has on its way at once."""
_LARGE_PAGE = 8 << 10
_TILE, _TILES = 32, 4
"""Blocks of 1 KiB that a program adds up at once, and programs that fit into a multiprocessor."""
_CHAINS, _AHEAD = 4, 16
"""Pieces that a program goes through at once, as many as a warp has lanes for, and steps for which
it fetches the sums together."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip


def constants() -> npt.NDArray[np.int64]:
    """The numbers of xxh3 that kernels read: where sums start; the secret as scrambling, the last
    stripe, the end, and the stripes of a block see it."""

    def secret(at: int, words: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(_SECRET, np.uint64, words, at)

    parts = (
        np.array(_START, np.uint64),
        secret(128, 8),
        secret(121, 8),
        secret(11, 8),
        secret(0, 24),
    )
    return np.concatenate(parts).view(np.int64)


# Where they begin among the numbers, after the eight to start with.
_SCRAMBLE = tl.constexpr(8)
_LAST = tl.constexpr(16)
_END = tl.constexpr(24)
_STRIPES = tl.constexpr(32)


# One build serves all numbers and places, because others would be built in the middle of some load.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["ids", "buffer", "items", "references", "per_chunk", "part_words"]
)
def _move(  # type: ignore[no-untyped-def]
    ids, refs, buffer, items, references, per_chunk, part_words,
    out: tl.constexpr, words_at_once: tl.constexpr,
):  # fmt: skip
    """Pages to the buffer (`out`), or from it. An item is the page of one reference and block;
    those of a record lie together. Negative blocks have no page."""
    words = tl.arange(0, words_at_once)
    ids = ids.to(tl.pointer_type(tl.int64))
    record = per_chunk * references
    item = tl.program_id(0)
    block = tl.load(ids + item // record * per_chunk + item % per_chunk)
    while item < items:
        place, ref, row = item % per_chunk, item // per_chunk % references, item // record
        base, stride = tl.load(refs + ref), tl.load(refs + references + ref)
        size = tl.load(refs + 2 * references + ref)
        size = tl.where(block >= 0, size, 0)
        start = tl.load(refs + 3 * references + ref) + size * place
        page = (base + stride * block).to(tl.pointer_type(tl.int64))
        staged = buffer + row.to(tl.int64) * part_words + start
        # The next one's number comes from the host's memory: it is on its way meanwhile.
        item += tl.num_programs(0)
        block = tl.load(
            ids + item // record * per_chunk + item % per_chunk, mask=item < items, other=-1
        )
        for at in range(0, size, words_at_once):
            word = at + words
            inside = word < size
            if out:
                tl.store(staged + word, tl.load(page + word, mask=inside), mask=inside)
            else:
                tl.store(page + word, tl.load(staged + word, mask=inside), mask=inside)


@triton.jit
def _product(key):  # type: ignore[no-untyped-def]
    return (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF)


@triton.jit
def _scramble(total, key):  # type: ignore[no-untyped-def]
    return ((total ^ ((total >> 47) & 0x1FFFF)) ^ key) * 0x9E3779B1


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(data, numbers, block, stripes, tile: tl.constexpr, whole: tl.constexpr):  # type: ignore[no-untyped-def]
    """What each block of a tile adds to the eight running totals."""
    lane = tl.arange(0, 8)[None, :]
    word = data + block * 128 + lane
    products = tl.zeros((tile, 8), tl.int64)
    added = tl.zeros((tile, 8), tl.int64)
    for stripe in tl.static_range(16):
        key = tl.load(numbers + stripe + lane)
        if whole:
            value = tl.load(word + stripe * 8)
            products += _product(value ^ key)
        else:
            inside = block * 16 + stripe < stripes
            value = tl.load(word + stripe * 8, mask=inside, other=0)
            products += tl.where(inside, _product(value ^ key), 0)
        added += value
    even, odd = tl.split(tl.reshape(added, (tile, 4, 2)))
    return products + tl.reshape(tl.join(odd, even), (tile, 8))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["buffer", "parts", "part_bytes", "pieces", "longest"]
)
def _add_blocks(  # type: ignore[no-untyped-def]
    buffer, numbers, totals, parts, part_bytes, pieces, longest,
    piece_bytes: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The sums of all blocks of all pieces; a piece has room for `longest` of them."""
    tiles = (longest + tile - 1) // tile
    unit = tl.program_id(0)
    while unit < parts * pieces * tiles:
        piece = unit // tiles
        start = (piece % pieces).to(tl.int64) * piece_bytes
        size = tl.where(piece % pieces == pieces - 1, part_bytes - start, piece_bytes)
        stripes = (size - 1) // 64
        data = buffer + ((piece // pieces).to(tl.int64) * part_bytes + start) // 8
        first = unit % tiles * tile
        block = first + tl.arange(0, tile)[:, None].to(tl.int64)
        if (first + tile) * 16 <= stripes:
            total = _add_up(data, numbers + _STRIPES, block, stripes, tile, True)
        else:
            total = _add_up(data, numbers + _STRIPES, block, stripes, tile, False)
        to = totals + (piece.to(tl.int64) * longest + block) * 8 + tl.arange(0, 8)[None, :]
        tl.store(to, total, mask=block * 16 <= stripes)
        unit += tl.num_programs(0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["buffer", "sums", "parts", "part_bytes", "pieces", "longest"]
)
def _finish(  # type: ignore[no-untyped-def]
    buffer, numbers, totals, sums, parts, part_bytes, pieces, longest,
    piece_bytes: tl.constexpr, chains: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """The checksums of pieces from the sums of their blocks."""
    piece = tl.program_id(0) * chains + tl.arange(0, chains)[:, None]
    lane = tl.arange(0, 8)[None, :]
    inside = piece < parts * pieces
    start = (piece % pieces).to(tl.int64) * piece_bytes
    size = tl.where(piece % pieces == pieces - 1, part_bytes - start, piece_bytes)
    full = (size - 1) // 1024
    source = totals + piece.to(tl.int64) * longest * 8 + lane
    key = tl.load(numbers + _SCRAMBLE + lane)
    total = tl.load(numbers + lane) + tl.zeros((chains, 8), tl.int64)
    for block in range(0, longest - 1, ahead):
        for step in tl.static_range(ahead):
            there = inside & (block + step < full)
            more = tl.load(source + (block + step) * 8, mask=there, other=0)
            total = tl.where(there, _scramble(total + more, key), total)
    total += tl.load(source + full * 8, mask=inside, other=0)
    data = buffer + ((piece // pieces).to(tl.int64) * part_bytes + start + size - 64) // 8
    value = tl.load(data + lane, mask=inside, other=0)
    total += _product(value ^ tl.load(numbers + _LAST + lane))
    total += tl.load(data + (lane ^ 1), mask=inside, other=0)
    ended = (total ^ tl.load(numbers + _END + lane)).to(tl.uint64, bitcast=True)
    even, odd = tl.split(tl.reshape(ended, (chains, 4, 2)))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    digest = (
        tl.sum(folded, axis=1)
        + tl.sum(tl.where(lane == 0, size, 0), axis=1).to(tl.uint64, bitcast=True)
        * 0x9E3779B185EBCA87
    )
    digest = (digest ^ (digest >> 37)) * 0x165667919E3779F9
    digest = digest ^ (digest >> 32)
    at = tl.program_id(0) * chains + tl.arange(0, chains)
    sums = sums.to(tl.pointer_type(tl.int64))
    tl.store(sums + at, digest.to(tl.int64, bitcast=True), mask=at < parts * pieces)


def move(
    ids: int, refs: Any, buffer: Any, rows: int, per_chunk: int, part_bytes: int, *, out: bool
) -> None:
    """Queue the copies of the pages of so many records, on torch's current stream.

    At the address `ids` is a block number for each place of each record. `refs` has four rows with
    one number for each reference: base and stride in bytes, page size and place in the part in
    words.
    """
    references = refs.shape[1]
    items = rows * references * per_chunk
    small = part_bytes < references * per_chunk * _LARGE_PAGE
    words, warps = (512, 4) if small else (2048, 8)
    _move[(min(items, PROGRAMS * _WORDS // words),)](
        ids, refs, buffer, items, references, per_chunk, part_bytes // 8,
        out=out, words_at_once=words, num_warps=warps,
    )  # fmt: skip


def totals_of(parts: int, part_bytes: int) -> int:
    """How many numbers `digest` needs for what it adds up."""
    return 8 * parts * pieces_of(part_bytes) * _blocks(part_bytes)


def digest(buffer: Any, numbers: Any, totals: Any, sums: int, parts: int, part_bytes: int) -> None:
    """Queue the checksums of all pieces of so many parts, on torch's current stream; they go to the
    address `sums`."""
    pieces, longest = pieces_of(part_bytes), _blocks(part_bytes)
    tiles = parts * pieces * -(-longest // _TILE)
    _add_blocks[(min(tiles, PROGRAMS * _TILES),)](
        buffer, numbers, totals, parts, part_bytes, pieces, longest,
        piece_bytes=PIECE_BYTES, tile=_TILE, num_warps=8,
    )  # fmt: skip
    _finish[(-(-parts * pieces // _CHAINS),)](
        buffer, numbers, totals, sums, parts, part_bytes, pieces, longest,
        piece_bytes=PIECE_BYTES, chains=_CHAINS, ahead=_AHEAD, num_warps=1,
    )  # fmt: skip


def _blocks(part_bytes: int) -> int:
    """The most blocks of 1 KiB that a piece of such a part has."""
    longest = part_bytes if pieces_of(part_bytes) == 1 else PIECE_BYTES + TAIL_BYTES - 1
    return (longest - 1) // 1024 + 1
