"""Which bytes go where: pure, vectorised planning of copies between device and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.records.record import HEADER_BYTES
from kvtier.device.layout import DeviceLayout

Ints = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """Device blocks of a job: per group `sizes[g]` block numbers, the first of which is block
    `starts[g]` of its request. Chunks are counted from the request's first block."""

    ids: Ints
    sizes: Sequence[int]
    starts: Sequence[int]


class Pieces(NamedTuple):
    """A job cut at chunk borders, one row a record, in the order of the job's keys.

    Row `i` is blocks `skip[i] : skip[i] + length[i]` of a chunk of group `group[i]`; their block
    numbers begin at `at[i]` in the job's ids.
    """

    group: Ints
    skip: Ints
    length: Ints
    at: Ints

    def __len__(self) -> int:
        return len(self.group)


class Copies(NamedTuple):
    """Contiguous copies, in the order of records; those of record `i` are
    `starts[i] : starts[i + 1]`. Addresses wrap like pointers do."""

    device: Ints
    host: Ints
    sizes: Ints
    starts: Ints


def cut(layout: DeviceLayout, blocks: Blocks) -> Pieces:
    """Cut a job into the pieces of its records; raises ValueError on blocks that cannot be."""
    ids, sizes, starts = blocks
    if len(sizes) != len(layout.groups) or len(starts) != len(sizes) or sum(sizes) != len(ids):
        raise ValueError("a job names blocks and a start for every group")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < layout.blocks:
        raise ValueError(f"block numbers lie between 0 and {layout.blocks - 1}")
    per_chunk = layout.blocks_per_chunk
    columns: list[Ints] = []
    at = 0
    for group, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        if not size:
            continue
        first = start % per_chunk
        edges = np.arange(-(-(first + size) // per_chunk) + 1, dtype=np.int64) * per_chunk - first
        low, high = np.maximum(edges[:-1], 0), np.minimum(edges[1:], size)
        columns.append(np.stack([np.full_like(low, group), low - edges[:-1], high - low, low + at]))
        at += size
    return Pieces(*np.concatenate(columns, axis=1)) if columns else Pieces(*_EMPTY)


def describe(layout: DeviceLayout, blocks: Blocks, pieces: Pieces, records: Ints) -> Copies:
    """The copies of pieces whose records lie at these addresses, neighbours merged."""
    columns = []
    for group in np.unique(pieces.group).tolist():
        rows = np.flatnonzero(pieces.group == group)
        length = pieces.length[rows]
        within = _ramp(length)
        ids = blocks.ids[np.repeat(pieces.at[rows], length) + within]
        place = np.repeat(pieces.skip[rows], length) + within
        owner = np.repeat(rows, length)
        refs = layout.groups[group]
        size = np.array([ref.page_bytes for ref in refs])[:, None]
        base = np.array([layout.tensors[ref.tensor].base for ref in refs])[:, None]
        stride = np.array([layout.tensors[ref.tensor].stride for ref in refs])[:, None]
        part = records[owner] + (HEADER_BYTES + layout.part * layout.part_bytes[group])
        device = base + stride * ids
        host = part + np.array(layout.ref_at[group])[:, None] + size * place
        every = np.broadcast_arrays(device, host, size, owner)
        columns.append([column.ravel() for column in every])
    if not columns:
        return Copies(_NONE, _NONE, _NONE, np.zeros(len(pieces) + 1, np.int64))
    device, host, size, owner = (np.concatenate(each) for each in zip(*columns, strict=True))
    return _merge(device, host, size, owner, len(pieces))


def _merge(device: Ints, host: Ints, sizes: Ints, owner: Ints, records: int) -> Copies:
    """Order copies by record, and join those that continue each other on both sides."""
    order = np.argsort(owner, kind="stable")
    device, host, sizes, owner = device[order], host[order], sizes[order], owner[order]
    apart = (
        (device[1:] != device[:-1] + sizes[:-1])
        | (host[1:] != host[:-1] + sizes[:-1])
        | (owner[1:] != owner[:-1])
    )
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    starts = np.searchsorted(owner[first], np.arange(records + 1))
    return Copies(device[first], host[first], np.add.reduceat(sizes, first), starts)


def _ramp(counts: Ints) -> Ints:
    """0..counts[0]-1, 0..counts[1]-1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - counts, counts)


_NONE = np.zeros(0, np.int64)
_EMPTY = np.zeros((4, 0), np.int64)
