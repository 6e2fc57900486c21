"""A storage that hears of a pool beside its KV cache that does not say where its pages lie."""

from __future__ import annotations

from kvtier.sglang.storage import KVTierStorage


class HybridStorage(KVTierStorage):
    def on_host_pools_registered(self) -> None:
        self.register_mem_host_pool_v2(object(), "mamba")
        super().on_host_pools_registered()
