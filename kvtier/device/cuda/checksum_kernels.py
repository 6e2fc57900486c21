"""Triton kernels for the checksums of records in a staging buffer.

The checksum is the record's: xxh3 with 64 bits and no seed, of every piece of a part. That adds up
blocks of 1 KiB, which is done for all of them at once, and then goes through these sums one after
the other, which is done for all pieces at once.
"""

# This is Triton's language, which looks like Python.
# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from kvtier.device.xxh3_constants import END_AT, LAST_AT, SCRAMBLE_AT, SECRET, START


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


# The shapes below give every thread one number of each tensor, next to its neighbours': no version
# of Triton has another choice. What a thread is to have on the way at once are tuples.
# One build serves all numbers and places, because others would be built in the middle of some load.


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
