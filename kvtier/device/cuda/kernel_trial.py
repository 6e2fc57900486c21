"""Whether a device's kernels do what they should: tried before any block is trusted to them.

A checksum that one kernel takes of what another has gathered says nothing of whether these were the
right pages. So both are compared with what numpy makes of the same random pages, at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.device.accelerator import Stage
from kvtier.device.copier import DeviceLayout, DeviceTensor, PageRef
from kvtier.record.record import PIECE_BYTES, part_sum

ROWS = 3
"""Records that are moved at once."""
_PER_CHUNK, _BLOCKS = 4, 32
_PAGES: Sequence[Sequence[tuple[int, int]]] = (
    [(512, 0), (24, 8), (4096, 64)],
    [(16384, 0), (40_000, 8), (PIECE_BYTES // 4, 0)],
)
"""Sizes and paddings: small pages, and large ones, whose parts have several pieces."""

Bytes = npt.NDArray[np.uint8]


def try_out(torch: Any, device: Any, make: Callable[[DeviceLayout], Stage]) -> None:
    """Raise RuntimeError if pages or checksums are not what they should be. `make` makes a buffer
    for `ROWS` records of a layout."""
    random = np.random.default_rng(0)
    for sizes in _PAGES:
        pools = [
            random.integers(0, 256, (_BLOCKS, page + padding), dtype=np.uint8)
            for page, padding in sizes
        ]
        there = [torch.from_numpy(pool.copy()).to(device) for pool in pools]
        refs = tuple(PageRef(index, page) for index, (page, _) in enumerate(sizes))
        tensors = tuple(
            DeviceTensor(on_device.data_ptr(), _BLOCKS, pool.shape[1], pool.shape[1])
            for on_device, pool in zip(there, pools, strict=True)
        )
        layout = DeviceLayout(tensors, (refs,), _PER_CHUNK)
        ids = random.permutation(_BLOCKS)[: 2 * ROWS * _PER_CHUNK].reshape(2, ROWS, _PER_CHUNK)
        away, back = ids[0], ids[1].copy()
        back[0, 0] = back[-1, -1] = -1
        host = torch.zeros(ROWS * layout.part_bytes[0], dtype=torch.uint8, pin_memory=True)
        _out(make(layout), layout, host, away, _parts(refs, pools, away))
        _in(make(layout), layout, host, back)
        _place(refs, pools, away, back)
        found = [pool.cpu().numpy() for pool in there]
        if not all((one == other).all() for one, other in zip(found, pools, strict=True)):
            raise RuntimeError("its kernels do not put pages where they belong")


def _parts(refs: Sequence[PageRef], pools: Sequence[Bytes], away: Any) -> Bytes:
    """The parts of records of these blocks."""
    rows = [
        np.concatenate(
            [pools[ref.tensor][block, : ref.page_bytes] for ref in refs for block in row]
        )
        for row in away
    ]
    return np.stack(rows)


def _place(refs: Sequence[PageRef], pools: Sequence[Bytes], away: Any, back: Any) -> None:
    """Copy pages from block to block."""
    pairs = [(old, new) for old, new in zip(away.flat, back.flat, strict=True) if new >= 0]
    for ref in refs:
        pool = pools[ref.tensor]
        pages = [pool[old, : ref.page_bytes].copy() for old, _ in pairs]
        for page, (_, new) in zip(pages, pairs, strict=True):
            pool[new, : ref.page_bytes] = page


def _out(stage: Stage, layout: DeviceLayout, host: Any, away: Any, wanted: Bytes) -> None:
    stage.gather(0, away)
    stage.digest(0, ROWS)
    held = stage.send(0, _addresses(layout, host))
    stage.record().synchronize()
    del held
    if not (host.numpy().reshape(wanted.shape) == wanted).all():
        raise RuntimeError("its kernels do not gather the right pages")
    if stage.sums(0, ROWS) != [part_sum(part.data) for part in wanted]:
        raise RuntimeError("its kernels do not take the right checksums")


def _in(stage: Stage, layout: DeviceLayout, host: Any, back: Any) -> None:
    held = stage.fetch(0, _addresses(layout, host))
    stage.scatter(0, back)
    stage.record().synchronize()
    del held


def _addresses(layout: DeviceLayout, host: Any) -> Any:
    return int(host.data_ptr()) + layout.part_bytes[0] * np.arange(ROWS, dtype=np.int64)
