"""Parts of records regrouped: from those of as many ranks as have written them to this rank's own.

Ranks of every tensor-parallel size hold the same layers and tokens, and each its share of the heads
of every layer. A page is rows, each of which holds some bytes of every head of its rank, one head
behind the other (`PageRef.head_bytes`): a row is a token, or all of the page's tokens. There are as
many rows at every size, and they differ in length alone. So a rank's part is a strided copy of each
of those parts that hold heads of its own; and each of these is runs of bytes, one behind the other,
some of which go to the rank's pages.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, Self

import numpy as np

from kvtier.device.layout import Bytes, DeviceLayout, Ints, PageRef


class _Pages(NamedTuple):
    """The pages of references that are alike, in one part or another: rows of heads."""

    at: int
    rows: int
    heads: int
    head_bytes: int

    def of(self, part: Bytes) -> Bytes:
        """They, in a part: row, head, byte."""
        _, rows, heads, size = self
        return part[self.at : self.at + rows * heads * size].reshape(rows, heads, size)


class _HeadCopy(NamedTuple):
    """From one of the parts, some of its heads, to some of this rank's."""

    part: int
    refs: slice
    """The references whose pages these are."""
    source: _Pages
    there: slice
    target: _Pages
    here: slice


class Regrouping(NamedTuple):
    """How this rank's part of a group's records is made of parts that others have written."""

    sources: range
    """Which parts: those with heads of this rank's."""
    source_bytes: int
    head_bytes: int
    """What all of their heads' bytes that lie together are a multiple of."""
    copies: list[_HeadCopy]

    @classmethod
    def of(cls, layout: DeviceLayout, group: int, parts: int) -> Self | None:
        """From so many parts; None where these cannot be shares of the same heads."""
        refs, own, part = layout.groups[group], layout.parts, layout.part
        if not layout.knows_heads or any(ref.heads * own % parts for ref in refs):
            return None
        sources = range(part * parts // own, -(-(part + 1) * parts // own))
        copies: list[_HeadCopy] = []
        for shape, alike in itertools.groupby(range(len(refs)), lambda at: _shape(refs[at])):
            page_bytes, heads, size = shape
            first, *others = alike
            these = slice(first, first + 1 + len(others))
            rows = (1 + len(others)) * layout.blocks_per_chunk * page_bytes // (heads * size)
            theirs, at = heads * own // parts, layout.ref_at[group][first]
            target = _Pages(at, rows, heads, size)
            source = _Pages(at * own // parts, rows, theirs, size)
            for each in sources:
                start = max(part * heads, each * theirs)
                stop = min((part + 1) * heads, (each + 1) * theirs)
                here = slice(start - part * heads, stop - part * heads)
                there = slice(start - each * theirs, stop - each * theirs)
                copies.append(_HeadCopy(each, these, source, there, target, here))
        head_bytes = math.gcd(*(ref.head_bytes for ref in refs))
        return cls(sources, layout.group_bytes[group] // parts, head_bytes, copies)

    def source(self, payload: Bytes, part: int) -> Bytes:
        """A part of a record's payload."""
        return payload[part * self.source_bytes : (part + 1) * self.source_bytes]

    def copy(self, payload: Bytes, into: Bytes) -> None:
        """Make this rank's part of a record's payload."""
        for part, _, source, there, target, here in self.copies:
            target.of(into)[:, here] = source.of(self.source(payload, part))[:, there]

    def runs(self, part: int, pages: Ints) -> tuple[Ints, Ints]:
        """One of the sources as runs of bytes, in order: where each goes, -1 for nowhere, for
        records whose pages lie at these addresses (record, reference, block), or nowhere; and how
        long it is."""
        records = len(pages)
        places, lengths = [], []
        for _, refs, source, there, target, here in (c for c in self.copies if c.part == part):
            first = pages[:, refs, :, None]
            rows = source.rows // first[0].size
            size = target.head_bytes
            inside = np.arange(rows) * (target.heads * size) + here.start * size
            runs = (there.start, there.stop - there.start, source.heads - there.stop)
            place = np.full((*first.shape[:3], rows, 3), -1, np.int64)
            place[..., 1] = np.where(first >= 0, first + inside, -1)
            some = np.flatnonzero(runs)
            places.append(place[..., some].reshape(records, -1))
            lengths.append(np.tile(np.array(runs)[some] * size, source.rows))
        return np.concatenate(places, axis=1), np.concatenate(lengths)


def _shape(ref: PageRef) -> tuple[int, int, int]:
    return ref.page_bytes, ref.heads, ref.head_bytes
