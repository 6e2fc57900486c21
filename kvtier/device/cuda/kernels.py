"""Triton kernels between an engine's pages and a staging buffer, and for the checksums in it.

`page_kernels` and `checksum_kernels` are the kernels themselves; here they are built and launched.
"""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import triton

from kvtier.core.records.record import PIECE_BYTES, TAIL_BYTES, pieces_of
from kvtier.device import accelerator
from kvtier.device.cuda.checksum_kernels import add_blocks, finish_sums
from kvtier.device.cuda.kernel_launch import Launch, by_triton
from kvtier.device.cuda.page_kernels import bring_numbers, move_pages

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
