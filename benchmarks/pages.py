"""An engine's KV tensors in host memory, where loads end: filled by a plain copy, or by kvtier's
copier, which proves what it copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.core.interfaces.handler import HostRegion
from kvtier.core.interfaces.mover import TransferKind
from kvtier.core.records.record import Buffer
from kvtier.device.copier import Job
from kvtier.device.copy_plan import Blocks
from kvtier.device.cpu_copier import CpuCopier, PageCopier
from kvtier.device.layout import DeviceLayout, DeviceTensor, PageRef
from kvtier.types import BlockKey

LAYERS, PER_CHUNK = 16, 16


class Pages:
    """Pages of sixteen layers; a chunk's blocks are neighbours, and chunks in no order."""

    def __init__(self, payload: int, count: int) -> None:
        page = payload // (LAYERS * PER_CHUNK)
        self._arrays = [np.zeros((count * PER_CHUNK, page), np.uint8) for _ in range(LAYERS)]
        tensors = [
            DeviceTensor(int(array.ctypes.data), len(array), page, page) for array in self._arrays
        ]
        refs = tuple(PageRef(layer, page) for layer in range(LAYERS))
        self._layout = DeviceLayout(tuple(tensors), (refs,), PER_CHUNK)
        self._plain = PageCopier(self._layout, self._arrays)
        chunks = np.random.default_rng(1).permutation(count)
        self._ids = chunks[:, None] * PER_CHUNK + np.arange(PER_CHUNK)

    def copy(self, payloads: Sequence[Buffer]) -> None:
        """Copy payloads to their pages, unproved."""
        for payload, ids in zip(payloads, self._ids.tolist(), strict=True):
            self._plain.scatter(0, ids, 0, payload)

    def copier(
        self, region: HostRegion, namespace: bytes
    ) -> tuple[Callable[[Sequence[BlockKey], Sequence[int]], Callable[[], None]], CpuCopier]:
        """What begins to copy records of a region as they arrive there, and answers with what waits
        for their end; and the copier to close."""
        copier = CpuCopier(self._layout, self._arrays, region, namespace)
        numbers = itertools.count(1)
        ids = self._ids.ravel()

        def begin(keys: Sequence[BlockKey], slots: Sequence[int]) -> Callable[[], None]:
            job = Job(
                id=next(numbers),
                kind=TransferKind.LOAD,
                keys=keys,
                slots=slots,
                blocks=Blocks(ids, [len(ids)], [0]),
                deadline=float("inf"),
            )
            copier.submit(job)

            def wait() -> None:
                copier.wait([job.id])
                (result,) = copier.poll()
                assert result.ok

            return wait

        return begin, copier
