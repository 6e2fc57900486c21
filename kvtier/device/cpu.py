"""The copier for KV tensors that lie in host memory: an engine on its CPU platform.

Each byte is read once: kernels for the processor copy records and take their checksums in one pass
(`host_kernels`), all records of a load's batch in one call. Where there are none, one strided copy
moves the pages of all layers of neighbouring blocks at once, at the speed of a plain memmove and
without the GIL, in strips that are added to the checksum right after, while the processor's
caches hold them. If the checksum of a large record is wrong in the end, the load has failed, and
the engine computes what the pages should hold; a small one is proved first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtier.device.host_kernels import Kernels, OnePassCopies, build
from kvtier.device.layout import Bytes, DeviceLayout, Ints
from kvtier.device.queue import CLOSE_S, CopyBatch, DeviceCopier, JobQueue
from kvtier.device.records import RankRecords, RecordParts, Sums, up_to_wrong
from kvtier.record.record import Buffer, PartSum, part_sum
from kvtier.system.calls import joined
from kvtier.types import BlockKey, Outcome

logger = logging.getLogger(__name__)

_STRIP_BYTES = 256 << 10
"""Processors have several times as much cache for each core. A part that is no larger is proved
before it is copied from there."""


def host_arrays(caches: Any) -> list[Bytes]:
    """The KV tensors of canonical caches in host memory as arrays of pages, without copying."""
    return [entry.tensor.numpy().view(np.uint8) for entry in caches.tensors]


class _Stack(NamedTuple):
    """References whose pages are equally large and equally far apart: one strided array."""

    pages: Bytes
    """Block, reference, byte."""
    at: int
    """Where their pages begin in the part."""


class PageCopier:
    """Copies pages between KV tensors and a rank's part of a record, whose checksum it takes."""

    def __init__(
        self, layout: DeviceLayout, arrays: Sequence[Bytes], kernels: Kernels | None = None
    ) -> None:
        self._per_chunk = layout.blocks_per_chunk
        # A stack's view keeps the first of its tensors alive alone, and the kernels none.
        self._keep = arrays
        self.one_pass = kernels and OnePassCopies(kernels, layout, arrays)
        self._stacks = [self._stack(layout, group, arrays) for group in range(len(layout.groups))]

    def _stack(self, layout: DeviceLayout, group: int, arrays: Sequence[Bytes]) -> list[_Stack]:
        refs = layout.groups[group]
        stacks = []
        first = 0
        while first < len(refs):
            stop, step = _alike(layout, group, arrays, first)
            base = arrays[refs[first].tensor]
            pages = np.lib.stride_tricks.as_strided(
                base,
                (layout.blocks[group], stop - first, refs[first].page_bytes),
                (base.strides[0], step, 1),
            )
            stacks.append(_Stack(pages, layout.ref_at[group][first]))
            first = stop
        return stacks

    def gather(self, group: int, ids: Sequence[int], part: Buffer) -> int:
        """Copy a whole chunk's blocks to their places in a part; the checksum of the part."""
        if self.one_pass and (found := self.one_pass.store(group, ids, part)) is not None:
            return found
        for stack in self._stacks[group]:
            host = self._host(stack, part)
            for start, stop in _runs(ids):
                block = ids[start]
                pages = stack.pages[block : block + stop - start]
                host[:, start:stop] = pages.swapaxes(0, 1)
        return part_sum(part)

    def scatter(self, group: int, blocks: Ints, parts: RecordParts, stated: Sums) -> Sums:
        """Copy records' parts to these blocks of the device, a row of blocks each, to none where
        its number is negative; the checksums of all parts. Copies nothing more once one is not as
        stated; a small part that is not does not begin to be copied either."""
        first = parts.of_slots.shape[1] <= _STRIP_BYTES
        if self.one_pass:
            sums = self.one_pass.load(group, blocks, parts, stated, verified_first=first)
            if sums is not None:
                return sums
        found, right = np.empty_like(stated), True
        for row, slot in enumerate(parts.slots.tolist()):
            part = parts.of_slots[slot].data
            if first or not right:
                found[row] = part_sum(part)
                right = right and bool(found[row] == stated[row])
            if right:
                found[row] = self._in_strips(group, blocks[row], part)
                right = bool(found[row] == stated[row])
        return found

    def _in_strips(self, group: int, places: Ints, part: Buffer) -> int:
        """Copy a part, and add up all of it."""
        inside = np.flatnonzero(places >= 0)
        if not len(inside):
            return part_sum(part)
        ids, skip = places[inside].tolist(), int(inside[0])
        total, runs = PartSum(len(part)), _runs(ids)
        for stack in self._stacks[group]:
            host = self._host(stack, part)
            size = host[0].nbytes
            step = max(1, _STRIP_BYTES // size)
            for first in range(0, len(host), step):
                strip = host[first : first + step]
                at = stack.at + first * size
                for start, stop in runs:
                    block = ids[start]
                    pages = stack.pages[block : block + stop - start, first : first + len(strip)]
                    pages.swapaxes(0, 1)[:] = strip[:, skip + start : skip + stop]
                total.add(part[at : at + strip.nbytes])
        return total.value()

    def _host(self, stack: _Stack, part: Buffer) -> Bytes:
        _, refs, size = stack.pages.shape
        array = np.frombuffer(part, np.uint8, refs * self._per_chunk * size, stack.at)
        return array.reshape(refs, self._per_chunk, size)


def _alike(
    layout: DeviceLayout, group: int, arrays: Sequence[Bytes], first: int
) -> tuple[int, int]:
    """Where the references end that form one strided array with the first, and its step."""
    refs = layout.groups[group]

    def address(index: int) -> int:
        return int(arrays[refs[index].tensor].__array_interface__["data"][0])

    def shape(index: int) -> tuple[int, int]:
        return refs[index].page_bytes, arrays[refs[index].tensor].strides[0]

    stop = first + 1
    if stop == len(refs) or shape(stop) != shape(first):
        return stop, 0
    step = address(stop) - address(first)
    while (
        stop < len(refs)
        and shape(stop) == shape(first)
        and address(stop) - address(stop - 1) == step
    ):
        stop += 1
    return stop, step


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of neighbouring block numbers, as (start, stop)."""
    cuts = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(ids)], strict=True))


class CpuCopier(DeviceCopier):
    """Moves records with a few threads; one for stores, which waits while loads need the time."""

    _BATCH_BYTES = 4 << 20

    def __init__(
        self,
        records: RankRecords,
        arrays: Sequence[Bytes],
        *,
        load_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._pages = PageCopier(records.layout, arrays, build())
        self.jobs = jobs = JobQueue(records, self._BATCH_BYTES, clock, sharers=load_threads)
        serving = [(jobs.load, self._load)] * load_threads
        self._threads: list[threading.Thread] = []
        try:
            for args in [*serving, (jobs.store_after_loads, self._store)]:
                thread = threading.Thread(
                    target=jobs.serve, args=args, name="kvtier-copy", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the system gives no more threads
            self.close()
            raise

    def close(self) -> None:
        self.jobs.close()
        if not joined(self._threads, CLOSE_S):  # what it copies stays mapped: it holds views
            logger.error("a thread that copies has not ended within %g s", CLOSE_S)

    def _store(self, batch: CopyBatch) -> None:
        """Copy and seal records, one by one."""
        rows = zip(batch.slots, batch.keys, batch.ids.tolist(), strict=True)
        outcomes = [self._store_one(slot, key, batch.group, ids) for slot, key, ids in rows]
        self.jobs.finish(batch, outcomes)

    def _store_one(self, slot: int, key: BlockKey, group: int, ids: list[int]) -> Outcome:
        if not self._records.reserved(slot, key).ok:
            return Outcome.GONE
        checksum = self._pages.gather(group, ids, self._records.part(slot, group))
        return self._records.seal(slot, key, group, checksum)

    def _load(self, batch: CopyBatch) -> None:
        """Verify records, and copy them up to the first of the load that is not right."""
        work, group, blocks = batch.work, batch.group, batch.ids
        found = self._records.find(batch.slots, batch.keys, group)
        one_pass = self._pages.one_pass
        if not (one_pass and all(one_pass.takes(group, each.regrouping) for each in found.others)):
            found = self._records.regrouped(found, group)
        right = found.fit.copy()
        copied = up_to_wrong(right, work.failed)
        blocks[~copied] = -1
        for others in found.others:
            assert one_pass is not None
            first = others.regrouping.source_bytes <= _STRIP_BYTES
            right[others.rows] = one_pass.load_others(
                group, blocks[others.rows], others, verified_first=first
            )
            blocks[~up_to_wrong(right, work.failed)] = -1
        rows = np.flatnonzero(found.own)
        if len(rows):
            stated, parts = found.stated[rows], found.parts.only(rows)
            right[rows] = self._pages.scatter(group, blocks[rows], parts, stated) == stated
        copied &= up_to_wrong(right, work.failed)
        self.jobs.finish(batch, found.outcomes(right, copied))
