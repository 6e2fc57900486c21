"""An engine's KV tensors in host memory, where loads end: filled by a plain copy, or by kvtier's
copier, which proves what it copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.device.copier import CopyJob
from kvtier.device.cpu import CpuCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.records import RankRecords
from kvtier.interfaces.handler import HostRegion
from kvtier.interfaces.mover import TransferKind
from kvtier.record.record import Buffer
from kvtier.types import BlockKey

LAYERS, PER_CHUNK = 16, 16


class Pages:
    """Pages of sixteen layers; a chunk's blocks are neighbours, and chunks in no order."""

    def __init__(self, payload: int, count: int) -> None:
        page = payload // (LAYERS * PER_CHUNK)
        room = np.zeros(LAYERS * count * PER_CHUNK * page + 64, np.uint8)
        first = -int(room.ctypes.data) % 64  # as torch aligns tensors
        self._layers = room[first : first + room.nbytes - 64].reshape(LAYERS, -1, page)
        self._arrays = list(self._layers)
        tensors = [
            DeviceTensor(int(array.ctypes.data), len(array), page, page) for array in self._arrays
        ]
        refs = tuple(PageRef(layer, page) for layer in range(LAYERS))
        self._layout = DeviceLayout(tuple(tensors), (refs,), PER_CHUNK)
        chunks = np.random.default_rng(1).permutation(count)
        self._ids = chunks[:, None] * PER_CHUNK + np.arange(PER_CHUNK)

    def copy(self, payloads: Sequence[Buffer]) -> None:
        """Copy payloads to their pages, unproved."""
        for payload, first in zip(payloads, self._ids[:, 0].tolist(), strict=True):
            pages = self._layers[:, first : first + PER_CHUNK]
            pages[:] = np.frombuffer(payload, np.uint8).reshape(pages.shape)

    def by_torch(self, payloads: Sequence[Buffer]) -> Callable[[], None]:
        """What does the same by torch, in the thread that calls it."""
        import torch

        torch.set_num_threads(1)
        layers = torch.from_numpy(self._layers)
        targets = [layers[:, first : first + PER_CHUNK] for first in self._ids[:, 0].tolist()]
        sources = [
            torch.frombuffer(payload, dtype=torch.uint8).view(target.shape)
            for payload, target in zip(payloads, targets, strict=True)
        ]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return copy

    def copier(
        self, region: HostRegion, namespace: bytes
    ) -> tuple[Callable[[Sequence[BlockKey], Sequence[int]], Callable[[], None]], CpuCopier]:
        """What begins to copy records of a region as they arrive there, and answers with what waits
        for their end; and the copier to close."""
        copier = CpuCopier(RankRecords(self._layout, region, namespace), self._arrays)
        numbers = itertools.count(1)
        ids = self._ids.ravel()

        def begin(keys: Sequence[BlockKey], slots: Sequence[int]) -> Callable[[], None]:
            job = CopyJob(
                id=next(numbers),
                kind=TransferKind.LOAD,
                keys=keys,
                slots=slots,
                blocks=DeviceBlocks(ids, [len(ids)], [0]),
                deadline=float("inf"),
            )
            copier.submit(job)

            def wait() -> None:
                copier.wait([job.id])
                (result,) = copier.poll()
                assert result.ok

            return wait

        return begin, copier
