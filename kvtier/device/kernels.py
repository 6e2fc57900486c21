"""The Triton kernel for many small copies from pinned memory."""

from __future__ import annotations

import subprocess
from typing import Any

import triton
import triton.language as tl

PROGRAMS = 12
"""Few multiprocessors fill the link; the rest is for the model."""
WORDS = 1024
ERRORS = (RuntimeError, OSError, subprocess.SubprocessError, triton.errors.TritonError)
"""What building or launching a kernel may raise: no compiler, no driver, too old a device."""


# One build serves every count, because each would be built in the middle of some load.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _copy(table, count, words_at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row 0 of the table is targets, row 1 sources, row 2 sizes; all in whole words of 8 bytes."""
    offsets = tl.arange(0, words_at_once)
    piece = tl.program_id(0)
    while piece < count:
        target = tl.load(table + piece).to(tl.pointer_type(tl.int64))
        source = tl.load(table + count + piece).to(tl.pointer_type(tl.int64))
        words = tl.load(table + 2 * count + piece) // 8
        for start in range(0, words, words_at_once):
            at = start + offsets
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)
        piece += tl.num_programs(0)


def scatter(table: Any, count: int, programs: int = PROGRAMS) -> None:
    """Queue the copies of a table on torch's current stream."""
    _copy[(min(programs, count),)](table, count, words_at_once=WORDS)
