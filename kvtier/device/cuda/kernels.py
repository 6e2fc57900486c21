"""The Triton kernels between an engine's pages and a staging buffer, and for the checksums in it:
themselves, and how they are built and launched.

The shapes in them give every thread one number of each tensor, next to its neighbours': no version
of Triton has another choice. What a thread is to have on the way at once are tuples. One build
serves all numbers and places, because others would be built in the middle of some load.

The checksum is the record's: xxh3 with 64 bits and no seed, of every piece of a part. That adds up
blocks of 1 KiB, which is done for all of them at once, and then goes through these sums one after
the other, which is done for all pieces at once.
"""

# Kernels are Triton's language, which looks like Python.
# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"

from __future__ import annotations

import logging
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from kvtier.device import copier
from kvtier.device.cuda.runtime import Launch, by_triton
from kvtier.device.host_kernels import END_AT, LAST_AT, SCRAMBLE_AT, SECRET, START
from kvtier.record.record import PIECE_BYTES, TAIL_BYTES, pieces_of

logger = logging.getLogger(__name__)


@triton.jit(do_not_specialize=["there", "here", "count"])
def bring_numbers(there, here, count, threads: tl.constexpr):
    """Numbers from host memory, which answers late: one program waits for them, not all."""
    there = there.to(tl.pointer_type(tl.int64))
    for at in range(0, count, threads):
        number = at + tl.arange(0, threads)
        inside = number < count
        tl.store(here + number, tl.load(there + number, mask=inside), mask=inside)


@triton.jit
def _copy(target, source, word, end, together: tl.constexpr, steps: tl.constexpr):
    values = ()
    for step in tl.static_range(steps):
        here = word + step * together
        values += (tl.load(source + here, mask=here < end),)
    for step in tl.static_range(steps):
        here = word + step * together
        tl.store(target + here, values[step], mask=here < end)


@triton.jit(
    do_not_specialize=[
        "ids", "buffer", "units", "segments", "longest", "references", "per_chunk", "part_words",
    ]
)  # fmt: skip
def move_pages(
    ids, refs, buffer, units, segments, longest, references, per_chunk, part_words,
    out: tl.constexpr, segment_words: tl.constexpr, units_at_once: tl.constexpr,
    together: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """Pages to the buffer (`out`), or from it. A unit is a segment of the page of one reference and
    block; those of a record lie together, and so many threads share one. Negative blocks have no
    page."""
    thread = tl.arange(0, units_at_once * together)
    record = per_chunk * references
    first = tl.program_id(0) * units_at_once
    while first < units:
        unit = first + thread // together
        item = unit // segments
        place, ref, row = item % per_chunk, item // per_chunk % references, item // record
        block = tl.load(ids + row * per_chunk + place, mask=unit < units, other=-1)
        base, stride = tl.load(refs + ref), tl.load(refs + references + ref)
        size = tl.load(refs + 2 * references + ref)
        start = tl.load(refs + 3 * references + ref) + size * place
        page = (base + stride * block).to(tl.pointer_type(tl.int64))
        staged = buffer + row.to(tl.int64) * part_words + start
        begin = unit % segments * segment_words
        end = tl.where(block >= 0, tl.minimum(size.to(tl.int32), begin + segment_words), 0)
        for at in range(0, longest, steps * together):
            word = begin + at + thread % together
            if out:
                _copy(staged, page, word, end, together, steps)
            else:
                _copy(page, staged, word, end, together, steps)
        first += tl.num_programs(0) * units_at_once


# -- checksums -------------------------------------------------------------------------------


def constants() -> npt.NDArray[np.int64]:
    """The numbers of xxh3 that kernels read: where sums start; the secret as scrambling, the last
    stripe, the end, and the stripes of a block see it."""

    def secret(at: int, words: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(SECRET, np.uint64, words, at)

    parts = (
        np.array(START, np.uint64),
        secret(SCRAMBLE_AT, 8),
        secret(LAST_AT, 8),
        secret(END_AT, 8),
        secret(0, 24),
    )
    return np.concatenate(parts).view(np.int64)


# Where they begin among the numbers, after the eight to start with.
_SCRAMBLE = tl.constexpr(8)
_LAST = tl.constexpr(16)
_END = tl.constexpr(24)
_STRIPES = tl.constexpr(32)


@triton.jit
def _product(key):
    return (key & 0xFFFFFFFF) * ((key >> 32) & 0xFFFFFFFF)


@triton.jit
def _scramble(total, key):
    return ((total ^ ((total >> 47) & 0x1FFFF)) ^ key) * 0x9E3779B1


@triton.jit
def _tile(unit, units, part_bytes, pieces, longest, piece_bytes: tl.constexpr, tile: tl.constexpr):
    """How many whole blocks it has, where they lie in the buffer, and where their sums go."""
    tiles = (longest + tile - 1) // tile
    piece, first = unit // tiles, unit % tiles * tile
    start = (piece % pieces).to(tl.int64) * piece_bytes
    size = tl.where(piece % pieces == pieces - 1, part_bytes - start, piece_bytes)
    whole = ((size - 1) // 1024).to(tl.int32) - first
    source = ((piece // pieces).to(tl.int64) * part_bytes + start) // 8 + first * 128
    return tl.where(unit < units, whole, 0), source, (piece.to(tl.int64) * longest + first) * 8


@triton.jit
def _words_from(source, inside):
    values = ()
    for stripe in tl.static_range(16):
        values += (tl.load(source + stripe * 8, mask=inside),)
    return values


@triton.jit(do_not_specialize=["buffer", "parts", "part_bytes", "pieces", "longest"])
def add_blocks(
    buffer, numbers, totals, parts, part_bytes, pieces, longest,
    piece_bytes: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The sums of all whole blocks of all pieces; a piece has room for `longest` of them."""
    # Words are pairs, because each of the eight of a stripe is also added to the other one's total.
    pair = tl.arange(0, 4 * tile)[:, None]
    lane = pair % 4 * 2 + tl.arange(0, 2)[None, :]
    block = pair // 4
    units = parts * pieces * ((longest + tile - 1) // tile)
    unit = tl.program_id(0)
    whole, source, to = _tile(unit, units, part_bytes, pieces, longest, piece_bytes, tile)
    values = _words_from(buffer + source + block * 128 + lane, block < whole)
    while unit < units:
        unit += tl.num_programs(0)
        # For the next round: so all of them are on their way at once, which compilers see to only
        # if none is of use in this one, and if they share a condition.
        coming, source, later = _tile(unit, units, part_bytes, pieces, longest, piece_bytes, tile)
        ahead = _words_from(buffer + source + block * 128 + lane, block < coming)
        total = tl.zeros((4 * tile, 2), tl.int64)
        added = tl.zeros((4 * tile, 2), tl.int64)
        for stripe in tl.static_range(16):
            total += _product(values[stripe] ^ tl.load(numbers + _STRIPES + stripe + lane))
            added += values[stripe]
        total += tl.sum(added, axis=1, keep_dims=True) - added
        tl.store(totals + to + block * 8 + lane, total, mask=block < whole)
        whole, to, values = coming, later, ahead


@triton.jit
def _totals_from(source, blocks: tl.constexpr):
    values = ()
    for block in tl.static_range(blocks):
        values += (tl.load(source + 8 * block),)
    return values


@triton.jit(do_not_specialize=["buffer", "sums", "parts", "part_bytes", "pieces", "longest"])
def finish_sums(
    buffer, numbers, totals, sums, parts, part_bytes, pieces, longest,
    piece_bytes: tl.constexpr, chains: tl.constexpr, ahead: tl.constexpr, few: tl.constexpr,
):  # fmt: skip
    """The checksums of pieces from the sums of whole blocks, and what is behind these."""
    at = tl.program_id(0) * chains + tl.arange(0, chains)
    piece = tl.minimum(at, parts * pieces - 1)[:, None]
    lane = tl.arange(0, 8)[None, :]
    start = (piece % pieces).to(tl.int64) * piece_bytes
    size = tl.where(piece % pieces == pieces - 1, part_bytes - start, piece_bytes)
    whole = ((size - 1) // 1024).to(tl.int32)
    source = totals + piece.to(tl.int64) * longest * 8 + lane
    key = tl.load(numbers + _SCRAMBLE + lane)
    total = tl.load(numbers + lane) + tl.zeros((chains, 8), tl.int64)
    # Each step waits for the one before. Nearly all of them are of blocks that every piece has:
    # there a step is shorter, because nothing is chosen, and multiplying adds as well.
    common = tl.min(whole) // ahead * ahead
    values = _totals_from(source, ahead)
    for block in range(0, common, ahead):
        # For the next round, so that nothing waits for them; those behind the piece are not used.
        coming = _totals_from(source + (block + ahead) * 8, ahead)
        for step in tl.static_range(ahead):
            total = _scramble(total + values[step], key)
        values = coming
    values = _totals_from(source + common * 8, few)
    for block in range(common, tl.max(whole), few):
        coming = _totals_from(source + (block + few) * 8, few)
        for step in tl.static_range(few):
            scrambled = _scramble(total + values[step], key)
            total = tl.where(block + step < whole, scrambled, total)
        values = coming
    data = buffer + ((piece // pieces).to(tl.int64) * part_bytes + start) // 8
    stripes = ((size - 1) // 64).to(tl.int32) - whole * 16
    for stripe in tl.static_range(15):
        inside, at_stripe = stripe < stripes, data + whole * 128 + stripe * 8
        product = _product(
            tl.load(at_stripe + lane, mask=inside, other=0)
            ^ tl.load(numbers + _STRIPES + stripe + lane)
        )
        total += tl.where(inside, product, 0)
        total += tl.load(at_stripe + (lane ^ 1), mask=inside, other=0)
    data += (size - 64) // 8
    value = tl.load(data + lane)
    total += _product(value ^ tl.load(numbers + _LAST + lane))
    total += tl.load(data + (lane ^ 1))
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
    sums = sums.to(tl.pointer_type(tl.int64))
    tl.store(sums + at, digest.to(tl.int64, bitcast=True), mask=at < parts * pieces)


# -- building and launching ------------------------------------------------------------------

ERRORS = (
    *copier.ERRORS,
    AssertionError,
    ImportError,
    subprocess.SubprocessError,
    triton.errors.TritonError,
)
"""What building or launching a kernel may raise: no compiler, no driver, too old a device, a folder
from which nothing may be executed, another Triton than expected."""

building = threading.Lock()
"""Held by whoever may have to build kernels: Triton says nothing of doing so in several threads."""

SHARE = 16
"""A kernel has one program for so many multiprocessors, each of which keeps one of them busy: the
model wants them, too, and where its kernels are, there may be no room for others beside them. With
twice as many programs a matrix product loses several times as much (docs/how_it_works/gpu.md)."""
_LEAST = 4
SMALLEST_PART = 256
"""Of shorter parts xxh3 is another function."""
WORD_BYTES = 8
"""Kernels move and add up whole words."""
_THREADS = 1024
"""As many as a program may have."""
_SEGMENT = 8192
"""Words of a page that are moved as one; larger pages are cut."""
_UNITS, _STEPS = 8, 8
"""Segments that a program moves at once, and words of them that a thread has on the way."""
_TILE = 128
"""Blocks of 1 KiB that a program adds up at once."""
_CHAINS, _AHEAD, _FEW = 16, 64, 8
"""Pieces that a program goes through at once, and steps for which it fetches the sums together: as
far as all pieces go, and behind that. How long Triton takes to build this grows with the square of
both together: 20 seconds for 64 and 64."""


def build(words: Any) -> None:
    """Build all of them at once, by several threads, for memory like `words`: one takes seconds,
    and the others as long together. What is built already, or lies in Triton's cache, takes none.
    """
    if not hasattr(triton, "AsyncCompileMode") or triton.knobs.runtime.interpret:
        return  # they are built as they are launched, or not at all

    def only_build(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        kernel.warmup(*arguments, grid=(programs,), **constants)

    references = References(words.reshape(4, -1), 1)
    far, part_bytes, shape = 1 << 40, PIECE_BYTES, (1, 1)
    with ThreadPoolExecutor(_KERNELS) as threads, triton.AsyncCompileMode(threads):
        digest(words, words, words, far, 1, part_bytes, 1, only_build)  # the longest of all
        for out in (True, False):
            move(far, words, references, words, shape, part_bytes, 1, only_build, out=out)


_KERNELS = 5


def programs_of(multiprocessors: int) -> int:
    """How many programs a kernel has at the most, on a device with so many. One multiprocessor
    moves and adds up some 20 GB/s: with fewer than a few, small devices would not fill their link.
    """
    return min(multiprocessors, max(_LEAST, multiprocessors // SHARE))


class References(NamedTuple):
    """What `move` has to know of a group's references."""

    table: Any
    """Four rows with one number for each: base and stride in bytes, page size and place in the part
    in words."""
    longest: int
    """The most words that one of their pages has."""


def move(
    ids: int, here: Any, references: References, buffer: Any, shape: tuple[int, int],
    part_bytes: int, programs: int, launch: Launch = by_triton, *, out: bool,
) -> None:  # fmt: skip
    """Queue the copies of the pages of some records.

    At the address `ids` is a block number for each record and place (`shape`); they go to `here`
    first.
    """
    (rows, per_chunk), count = shape, references.table.shape[1]
    segments = -(-references.longest // _SEGMENT)
    units = rows * count * per_chunk * segments
    launch(
        bring_numbers, 1, ids, here, rows * per_chunk, threads=_THREADS, num_warps=_THREADS // 32
    )
    launch(
        move_pages, min(-(-units // _UNITS), programs), here, references.table, buffer, units,
        segments,
        min(references.longest, _SEGMENT), count, per_chunk, part_bytes // WORD_BYTES, out=out,
        segment_words=_SEGMENT, units_at_once=_UNITS, together=_THREADS // _UNITS, steps=_STEPS,
        num_warps=_THREADS // 32,
    )  # fmt: skip


def totals_of(parts: int, part_bytes: int) -> int:
    """How many numbers `digest` needs for what it adds up."""
    return 8 * (parts * pieces_of(part_bytes) * _blocks(part_bytes) + 2 * _AHEAD)


def digest(
    buffer: Any, numbers: Any, totals: Any, sums: int, parts: int, part_bytes: int, programs: int,
    launch: Launch = by_triton,
) -> None:  # fmt: skip
    """Queue the checksums of all pieces of so many parts; they go to the address `sums`."""
    pieces, longest = pieces_of(part_bytes), _blocks(part_bytes)
    tiles = parts * pieces * -(-longest // _TILE)
    launch(
        add_blocks, min(tiles, programs), buffer, numbers, totals, parts, part_bytes, pieces,
        longest, piece_bytes=PIECE_BYTES, tile=_TILE, num_warps=_THREADS // 32,
    )  # fmt: skip
    launch(
        finish_sums, -(-parts * pieces // _CHAINS), buffer, numbers, totals, sums, parts,
        part_bytes, pieces, longest, piece_bytes=PIECE_BYTES, chains=_CHAINS, ahead=_AHEAD,
        few=_FEW, num_warps=_CHAINS * 8 // 32,
    )  # fmt: skip


def _blocks(part_bytes: int) -> int:
    """The most whole blocks of 1 KiB that a piece of such a part has; one where there are none."""
    longest = part_bytes if pieces_of(part_bytes) == 1 else PIECE_BYTES + TAIL_BYTES - 1
    return max(1, (longest - 1) // 1024)
