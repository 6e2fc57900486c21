"""A host whose engine offloads by vLLM's own tiering, with kvtier's secondary tier below it.

Only its worker is not vLLM's own, which serves GPUs alone: `CpuTieringSpec` has one that copies
between an engine's KV tensors and vLLM's CPU tier, on the platform without GPUs.
"""

from __future__ import annotations

import time
from typing import Any

from host import SETTLE_S, Host, main
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies at once, block by block, and reports with the next step."""

    def __init__(self, caches: Any, per_chunk: int, region: Any) -> None:
        import torch

        self._refs = caches.group_data_refs
        self._per_chunk = per_chunk
        self._sizes = [each.page_size_bytes for each in caches.tensors]
        self._device = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors
        ]
        self._host = [region.create_next_worker_view(size * per_chunk) for size in self._sizes]
        self._region = region
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, store: bool) -> bool:
        block_ids, chunk_ids, moved = iter(blocks.block_ids), iter(chunks.chunk_ids), 0
        for group, size in enumerate(blocks.group_sizes):
            chunk, first = 0, blocks.block_indices[group] % self._per_chunk
            for place in range(first, first + size):
                within = place % self._per_chunk
                chunk = int(next(chunk_ids)) if within == 0 or place == first else chunk
                block = int(next(block_ids))
                for tensor in {ref.tensor_idx for ref in self._refs[group]}:
                    page = self._sizes[tensor]
                    there = self._host[tensor][chunk, within * page : (within + 1) * page]
                    here = self._device[tensor][block]
                    there.copy_(here) if store else here.copy_(there)
                    moved += page
        self._done.append(TransferResult(job_id, True, moved, 1e-6))
        return True

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """All are done when they have been submitted."""


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's spec but for the worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class NativeHost(Host):
    """The commands, for an engine without kvtier's connector."""

    @property
    def _tier(self) -> Any:
        (tier,) = self._vllm_manager.secondary_tiers
        return tier

    def settle(self) -> bool:
        """Let the engine step until all jobs have ended, and the stack has written all."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            self._step()
            tier = self._tier
            with tier._lock:
                busy = self._vllm_manager._jobs or tier.has_pending_work()
                if not busy and tier._chain.settled:
                    return True
            time.sleep(0.002)
        return False

    def forget_memory(self) -> bool:
        """Empty vLLM's prefix cache and its CPU tier."""
        self.settle()
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def clear(self, tier: int) -> None:
        """Forget all that one tier of the stack holds."""
        with self._tier._lock:
            self._tier._chain.tiers[tier].clear()

    def rest(self, pause: float) -> None:
        """For how long what has failed is left alone from now on."""
        self._tier._chain._context.loads._rest = pause
        self._tier._chain._context.stores._rest = pause

    def held(self) -> dict[str, int]:
        """How many blocks each tier of the stack holds."""
        tier = self._tier
        with tier._lock:
            return {each.medium: each.stats().blocks for each in tier._chain.tiers}

    def mover(self) -> int:
        """The process of the mover; waits for it if it is being started."""
        end = time.monotonic() + SETTLE_S
        while (found := self._tier._stack.mover.pid) is None:
            if time.monotonic() > end:
                raise TimeoutError("no mover")
            time.sleep(0.01)
        return int(found)

    def corrupt(self) -> int:
        """How many blocks were found to be."""
        tier = self._tier
        with tier._lock:
            return sum(each.stats().corrupt for each in tier._chain.tiers)


if __name__ == "__main__":
    main(NativeHost)
