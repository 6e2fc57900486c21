"""A storage that hears of states beside its KV cache, as in an engine of a hybrid model."""

from __future__ import annotations

from kvtier.sglang.storage import KVTierStorage


class HybridStorage(KVTierStorage):
    def on_host_pools_registered(self) -> None:
        self.register_mem_host_pool_v2(object(), "mamba")
