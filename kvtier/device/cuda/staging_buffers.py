"""Staging buffers on a CUDA device: records pass through them, and are verified there.

Pages are scattered, and the engine that copies over the link takes half a microsecond for each; the
device itself gathers them many times faster than the link carries them. A record's part crosses the
link in one piece, and the processors of the host never read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtier.device.copier import Stage, StreamEvent
from kvtier.device.cuda import kernels
from kvtier.device.cuda.runtime import QuickLaunch, end_of
from kvtier.device.layout import Bytes, DeviceLayout, DeviceTensor, Ints, PageRef
from kvtier.record.record import PIECE_BYTES, part_sum, pieces_of, sum_of

BUDGET_BYTES = 384 << 20
"""The most device memory that all buffers take, of what the model left; more only for the least
there can be: two in each direction, of one record each."""
_SHARE = 8
"""They take at most this part of what is free."""
_EACH_WAY = 3
"""Buffers for one direction: while one is on the link, others are filled, proved and emptied."""

_SAMPLE = 3 * PIECE_BYTES
"""What is added up to see whether a device does it rightly: several pieces."""


class Staging:
    """What all buffers of a layout share."""

    def __init__(self, torch: Any, index: int, layout: DeviceLayout, batch_copy: Any) -> None:
        self.torch = torch
        self.device = torch.device("cuda", index)
        self.layout = layout
        self.batch_copy = batch_copy
        self.numbers = self.on_device(kernels.constants())
        self.references = [
            references_of(layout, group, self.on_device) for group in range(len(layout.groups))
        ]
        self.programs = programs_on(torch, self.device)

    def on_device(self, array: Any) -> Any:
        return self.torch.from_numpy(array).to(self.device)

    def stages(self, batch_bytes: int, *, urgent: bool) -> list[CudaStage]:
        """Buffers for one direction; raises RuntimeError where they would not fit."""
        if (reason := why_not(self.layout)) is not None:
            raise RuntimeError(reason)
        sizes = self.layout.part_bytes
        free, _ = self.torch.cuda.mem_get_info(self.device)
        budget = max(BUDGET_BYTES, 4 * max(sizes))
        each_way = min(budget, free // _SHARE) // 2
        batch_bytes = min(batch_bytes, each_way // _EACH_WAY)
        rows = [max(1, batch_bytes // size) for size in sizes]
        count = each_way // max(row * size for row, size in zip(rows, sizes, strict=True))
        if count < 2:
            raise RuntimeError(
                f"buffers for records of {max(sizes) >> 20} MiB do not fit into the "
                f"{free >> 20} MiB that are free on the device"
            )
        return [CudaStage(self, rows, urgent=urgent) for _ in range(min(_EACH_WAY, count))]


def try_out(torch: Any, index: int, batch_copy: Any) -> None:
    """Build the kernels, which takes seconds, and see that they do what they should."""

    def make(layout: DeviceLayout) -> CudaStage:
        # Urgent, because torch has 32 streams of each kind and then gives them out anew: what this
        # takes of the other kind might soon be shared with the engine's own.
        return CudaStage(Staging(torch, index, layout, batch_copy), [TRIAL_ROWS], urgent=True)

    device = torch.device("cuda", index)
    with kernels.building:
        _queue(kernels.build, torch.empty(64, dtype=torch.int64, device=device))
        _try_kernels(torch, device, make)


def programs_on(torch: Any, device: Any) -> int:
    """How many programs a kernel may have."""
    return kernels.programs_of(torch.cuda.get_device_properties(device).multi_processor_count)


def references_of(
    layout: DeviceLayout, group: int, on_device: Callable[[Ints], Any]
) -> kernels.References:
    """A group's references for `kernels.move`."""
    refs = layout.groups[group]
    tensors = [layout.tensors[ref.tensor] for ref in refs]
    words = [ref.page_bytes // kernels.WORD_BYTES for ref in refs]
    rows = [
        [tensor.base for tensor in tensors],
        [tensor.stride for tensor in tensors],
        words,
        [at // kernels.WORD_BYTES for at in layout.ref_at[group]],
    ]
    return kernels.References(on_device(np.array(rows, np.int64)), max(words))


def why_not(layout: DeviceLayout) -> str | None:
    """Why a layout's records cannot be staged; None if they can."""
    numbers = [ref.page_bytes for group in layout.groups for ref in group]
    numbers += [number for tensor in layout.tensors for number in (tensor.base, tensor.stride)]
    if any(number % kernels.WORD_BYTES for number in numbers):
        return f"pages that are not made of words of {kernels.WORD_BYTES} bytes"
    if min(layout.part_bytes) < kernels.SMALLEST_PART:
        return f"records of fewer than {kernels.SMALLEST_PART} bytes"
    return None


class CudaStage:
    """A buffer with a stream of its own, for the parts of some records of one group."""

    def __init__(self, shared: Staging, rows: Sequence[int], *, urgent: bool) -> None:
        torch, layout = shared.torch, shared.layout
        self.rows = rows
        self._shared = shared
        self._torch = torch
        sizes = list(zip(rows, layout.part_bytes, strict=True))
        self._stream = torch.cuda.Stream(shared.device, priority=-1 if urgent else 0)

        def words(count: int) -> Any:
            return torch.empty(count, dtype=torch.int64, device=shared.device)

        with torch.cuda.stream(self._stream):
            # On the stream that uses it: on another, what was there before may still be in use.
            self._buffer = words(max(row * size for row, size in sizes) // kernels.WORD_BYTES)
            self._totals = words(max(kernels.totals_of(row, size) for row, size in sizes))
            self._ids_there = words(max(rows) * layout.blocks_per_chunk)
            # The kernels read and write these over the link themselves: the engines that copy to
            # and from the device have queues, in which a few bytes would wait for the other
            # direction. (torch asks whether the current stream is captured: not the default one.)
            ids = torch.empty(
                max(rows) * layout.blocks_per_chunk, dtype=torch.int64, pin_memory=True
            )
            count = max(row * pieces_of(size) for row, size in sizes)
            sums = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self._ids, self._sums = ids.numpy(), sums.numpy().view(np.uint64)
        self._ids_at, self._sums_at = int(ids.data_ptr()), int(sums.data_ptr())
        self._launch = QuickLaunch(torch, self._stream)
        address = int(self._buffer.data_ptr())
        self._parts = [address + size * np.arange(row, dtype=np.int64) for row, size in sizes]
        self._sizes = [np.full(row, size, np.int64) for row, size in sizes]

    def gather(self, group: int, ids: Ints) -> None:
        self._move(group, ids, out=True)

    def scatter(self, group: int, ids: Ints) -> None:
        self._move(group, ids, out=False)

    def _move(self, group: int, ids: Ints, *, out: bool) -> None:
        self._ids[: ids.size] = ids.reshape(-1)
        _queue(
            kernels.move,
            self._ids_at,
            self._ids_there,
            self._shared.references[group],
            self._buffer,
            ids.shape,
            self._shared.layout.part_bytes[group],
            self._shared.programs,
            self._launch,
            out=out,
        )

    def fetch(self, group: int, addresses: Ints) -> object:
        return self._cross(group, addresses, to_host=False)

    def send(self, group: int, addresses: Ints) -> object:
        return self._cross(group, addresses, to_host=True)

    def _cross(self, group: int, addresses: Ints, *, to_host: bool) -> object:
        here, sizes = self._parts[group][: len(addresses)], self._sizes[group][: len(addresses)]
        targets, sources = (addresses, here) if to_host else (here, addresses)
        with self._torch.cuda.stream(self._stream):
            return self._shared.batch_copy(targets, sources, sizes, not to_host)

    def digest(self, group: int, rows: int) -> None:
        size = self._shared.layout.part_bytes[group]
        _queue(
            kernels.digest,
            self._buffer,
            self._shared.numbers,
            self._totals,
            self._sums_at,
            rows,
            size,
            self._shared.programs,
            self._launch,
        )

    def sums(self, group: int, rows: int) -> list[int]:
        pieces = pieces_of(self._shared.layout.part_bytes[group])
        return [sum_of(row) for row in self._sums[: rows * pieces].reshape(rows, pieces).tolist()]

    def record(self) -> StreamEvent:
        return end_of(self._torch, self._stream)


class DeviceSums:
    """Takes the checksum of one piece of device memory at a time, and waits for it.

    Raises RuntimeError if the device takes another one than the host.
    """

    def __init__(self, torch: Any, device: Any, stream: Any, longest: int) -> None:
        self._torch = torch
        self._stream = stream
        self._launch = QuickLaunch(torch, stream)
        sample = np.random.default_rng(0).integers(0, 256, min(longest, _SAMPLE), dtype=np.uint8)
        with torch.cuda.stream(stream):
            self._sums = torch.empty(pieces_of(longest), dtype=torch.int64, pin_memory=True)
            self._numbers = torch.from_numpy(kernels.constants()).to(device)
            count = kernels.totals_of(1, longest)
            self._totals = torch.empty(count, dtype=torch.int64, device=device)
            there = torch.from_numpy(sample).to(device)
        self._programs = programs_on(torch, device)
        with kernels.building:
            found = self.take(there, 0, len(sample))
        if found != part_sum(sample.data):
            raise RuntimeError("its kernels do not take the right checksums")

    def can(self, skip: int, size: int) -> bool:
        """Whether the bytes are such as a kernel can take."""
        whole = not (skip % kernels.WORD_BYTES or size % kernels.WORD_BYTES)
        return whole and size >= kernels.SMALLEST_PART

    def take(self, buffer: Any, skip: int, size: int) -> int:
        """The checksum of a buffer's bytes after the first `skip`."""
        words = buffer[skip : skip + size].view(self._torch.int64)
        _queue(
            kernels.digest,
            words,
            self._numbers,
            self._totals,
            self._sums.data_ptr(),
            1,
            size,
            self._programs,
            self._launch,
        )
        self._stream.synchronize()
        return sum_of(self._sums[: pieces_of(size)].numpy().view(np.uint64).tolist())


def _queue(work: Any, *arguments: Any, **options: Any) -> None:
    try:
        work(*arguments, **options)
    except kernels.ERRORS as error:
        raise RuntimeError(f"a kernel for staged records failed: {error}") from error


# -- the kernels, tried before any block is trusted to them --------------------------------------

TRIAL_ROWS = 3
"""Records that are moved at once."""
_TRIAL_CHUNK, _TRIAL_BLOCKS = 4, 32
_TRIAL_PAGES: Sequence[Sequence[tuple[int, int]]] = (
    [(512, 0), (24, 8), (4096, 64)],
    [(16384, 0), (40_000, 8), (PIECE_BYTES // 4, 0)],
)
"""Sizes and paddings: small pages, and large ones, whose parts have several pieces."""


def _try_kernels(torch: Any, device: Any, make: Callable[[DeviceLayout], Stage]) -> None:
    """Raise RuntimeError if pages or checksums are not what they should be. `make` makes a buffer
    for `TRIAL_ROWS` records of a layout.

    A checksum that one kernel takes of what another has gathered says nothing of whether these were
    the right pages. So both are compared with what numpy makes of the same random pages, at every
    start.
    """
    random = np.random.default_rng(0)
    for sizes in _TRIAL_PAGES:
        pools = [
            random.integers(0, 256, (_TRIAL_BLOCKS, page + padding), dtype=np.uint8)
            for page, padding in sizes
        ]
        there = [torch.from_numpy(pool.copy()).to(device) for pool in pools]
        refs = tuple(PageRef(index, page) for index, (page, _) in enumerate(sizes))
        tensors = tuple(
            DeviceTensor(on_device.data_ptr(), _TRIAL_BLOCKS, pool.shape[1], pool.shape[1])
            for on_device, pool in zip(there, pools, strict=True)
        )
        layout = DeviceLayout(tensors, (refs,), _TRIAL_CHUNK)
        ids = random.permutation(_TRIAL_BLOCKS)[: 2 * TRIAL_ROWS * _TRIAL_CHUNK].reshape(
            2, TRIAL_ROWS, _TRIAL_CHUNK
        )
        away, back = ids[0], ids[1].copy()
        back[0, 0] = back[-1, -1] = -1
        host = torch.zeros(TRIAL_ROWS * layout.part_bytes[0], dtype=torch.uint8, pin_memory=True)
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
    stage.digest(0, TRIAL_ROWS)
    held = stage.send(0, _addresses(layout, host))
    stage.record().synchronize()
    del held
    if not (host.numpy().reshape(wanted.shape) == wanted).all():
        raise RuntimeError("its kernels do not gather the right pages")
    if stage.sums(0, TRIAL_ROWS) != [part_sum(part.data) for part in wanted]:
        raise RuntimeError("its kernels do not take the right checksums")


def _in(stage: Stage, layout: DeviceLayout, host: Any, back: Any) -> None:
    held = stage.fetch(0, _addresses(layout, host))
    stage.scatter(0, back)
    stage.record().synchronize()
    del held


def _addresses(layout: DeviceLayout, host: Any) -> Any:
    return int(host.data_ptr()) + layout.part_bytes[0] * np.arange(TRIAL_ROWS, dtype=np.int64)
