"""Both ends of a load in host memory: slots of a CPU tier, full of records, and an engine's KV
tensors, filled by a plain copy, or by kvtier's copier, which proves what it copies."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtier.device.copier import CopyJob
from kvtier.device.cpu import CpuCopier
from kvtier.device.layout import DeviceBlocks, DeviceLayout, DeviceTensor, PageRef
from kvtier.device.records import RankRecords
from kvtier.interfaces.backend import TierContext, backend
from kvtier.interfaces.handler import Handler, HostRegion, RegionHandler
from kvtier.interfaces.mover import TransferKind
from kvtier.interfaces.tier import Tier
from kvtier.record.record import HEADER_BYTES, Buffer, Header, record_bytes, seal
from kvtier.settings import Capacity, Persistence
from kvtier.types import BlockKey, LoadStoreSpec, Namespace, SlotSpec, block_key

LAYERS, PER_CHUNK = 16, 16


def namespace_of(payload: int) -> Namespace:
    """Of blocks of so many bytes."""
    return Namespace(facts={"model": "benchmark"}, group_bytes=(payload,))


def open_tier(kind: str, payload: int, size: int, **fields: Any) -> tuple[Tier, Handler]:
    """A tier of so many bytes for blocks of one size, and its handler; it leaves nothing behind."""
    opener = backend(kind)
    fields |= {"capacity": Capacity.parse(size), "persistence": Persistence.DISCARD}
    settings = opener.settings(**fields)
    context = TierContext(namespace_of(payload), f"benchmark-{os.getpid()}")
    return opener.open_tier(settings, context), opener.open_handler(settings, context)


def slots_of(spec: LoadStoreSpec) -> Sequence[int]:
    """The slots of host memory that a spec names."""
    assert isinstance(spec, SlotSpec)
    return spec.slots


class Slots:
    """A CPU tier with so many blocks, and room for some more."""

    def __init__(self, payload: int, count: int, spare: int = 0) -> None:
        self.payload = payload
        self.namespace = namespace_of(payload)
        # A quarter more: each of its slabs has a table, and all are equally large.
        size = (count + spare + 1) * (record_bytes(payload) + 64) * 5 // 4 + (1 << 20)
        self.tier, handler = open_tier("cpu", payload, size, name="benchmark", eviction="lru")
        assert isinstance(handler, RegionHandler)
        self.handler = handler
        keys = [block_key(f"host{i}".encode()) for i in range(count)]
        self.spec = self.tier.prepare_store(keys).spec
        self.views = handler.views(self.spec)
        self.payloads = [view[HEADER_BYTES : HEADER_BYTES + payload] for view in self.views]
        for view in self.payloads:
            view[:] = os.urandom(payload)
        self.seal(keys)
        self.tier.complete_store(keys)

    def seal(self, keys: Sequence[BlockKey], first: int = 0, ranks: int = 1) -> None:
        """Headers and checksums for records of these keys, as the workers that store make them."""
        for key, view in zip(keys, self.views[first:], strict=True):
            seal(view, Header(key, self.namespace.digest, self.payload, ranks))

    def close(self) -> None:
        self.handler.close()
        self.tier.close()


class Pages:
    """Pages of sixteen layers; a chunk's blocks are neighbours, and chunks in no order."""

    def __init__(self, payload: int, count: int, heads: Sequence[int] = ()) -> None:
        """Those of one rank; if it knows how the heads in them lie, it reads what others wrote."""
        page = payload // (LAYERS * PER_CHUNK)
        room = np.zeros(LAYERS * count * PER_CHUNK * page + 64, np.uint8)
        first = -int(room.ctypes.data) % 64  # as torch aligns tensors
        self._layers = room[first : first + room.nbytes - 64].reshape(LAYERS, -1, page)
        self._arrays = list(self._layers)
        tensors = [
            DeviceTensor(int(array.ctypes.data), len(array), page, page) for array in self._arrays
        ]
        refs = tuple(PageRef(layer, page, *heads) for layer in range(LAYERS))
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
            copier.jobs.submit(job)

            def wait() -> None:
                copier.jobs.wait([job.id])
                (result,) = copier.jobs.poll()
                assert result.ok

            return wait

        return begin, copier
