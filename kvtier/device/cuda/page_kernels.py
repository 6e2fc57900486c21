"""Triton kernels between an engine's pages and a staging buffer."""

# This is Triton's language, which looks like Python.
# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# The shapes below give every thread one number of each tensor, next to its neighbours': no version
# of Triton has another choice. What a thread is to have on the way at once are tuples.
# One build serves all numbers and places, because others would be built in the middle of some load.


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
