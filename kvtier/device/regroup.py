"""Parts of records regrouped: from those of as many ranks as have written them to this rank's own.

Ranks of every tensor-parallel size hold the same layers and tokens, and each its share of the heads
of every layer. A page is rows, each of which holds some bytes of every head of its rank, one head
behind the other (`PageRef.head_bytes`): a row is a token, or all of the page's tokens. There are as
many rows at every size, and they differ in length alone. So a rank's part is a strided copy of each
of those parts that hold heads of its own.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, Self

from kvtier.device.layout import Bytes, DeviceLayout, PageRef


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


class Regrouping(NamedTuple):
    """How this rank's part of a group's records is made of parts that others have written."""

    sources: range
    """Which parts: those with heads of this rank's."""
    source_bytes: int
    copies: list[tuple[int, _Pages, slice, _Pages, slice]]
    """From which part, which of its heads, to which."""

    @classmethod
    def of(cls, layout: DeviceLayout, group: int, parts: int) -> Self | None:
        """From so many parts; None where these cannot be shares of the same heads."""
        refs, own, part = layout.groups[group], layout.parts, layout.part
        if not layout.knows_heads or any(ref.heads * own % parts for ref in refs):
            return None
        sources = range(part * parts // own, -(-(part + 1) * parts // own))
        copies = []
        for shape, alike in itertools.groupby(range(len(refs)), lambda at: _shape(refs[at])):
            page_bytes, heads, size = shape
            first, *others = alike
            rows = (1 + len(others)) * layout.blocks_per_chunk * page_bytes // (heads * size)
            theirs, at = heads * own // parts, layout.ref_at[group][first]
            target = _Pages(at, rows, heads, size)
            source = _Pages(at * own // parts, rows, theirs, size)
            for each in sources:
                start = max(part * heads, each * theirs)
                stop = min((part + 1) * heads, (each + 1) * theirs)
                here = slice(start - part * heads, stop - part * heads)
                there = slice(start - each * theirs, stop - each * theirs)
                copies.append((each, source, there, target, here))
        return cls(sources, layout.group_bytes[group] // parts, copies)

    def source(self, payload: Bytes, part: int) -> Bytes:
        """A part of a record's payload."""
        return payload[part * self.source_bytes : (part + 1) * self.source_bytes]

    def copy(self, payload: Bytes, into: Bytes) -> None:
        """Make this rank's part of a record's payload."""
        for part, source, there, target, here in self.copies:
            target.of(into)[:, here] = source.of(self.source(payload, part))[:, there]


def _shape(ref: PageRef) -> tuple[int, int, int]:
    return ref.page_bytes, ref.heads, ref.head_bytes
