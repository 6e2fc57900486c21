"""A storage backend for SGLang's HiCache: the tiers of a stack below SGLang's own host memory.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "kvtier", "module_path": "kvtier.sglang.storage",
      "class_name": "KVTierStorage", "interface_v1": 1, "stack": "stack.yaml"}'

SGLang copies between the device and its own host memory, and names pages by hashes of all tokens up
to their end. Each of its ranks has a backend of its own, whose methods its storage threads call:
they may wait, and what they cannot get is computed.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_memory, get_server_args

from kvtier import config as stack_config
from kvtier.errors import ConfigError
from kvtier.guard import guarded
from kvtier.sglang import identity
from kvtier.sglang.pages import HostPages, PageStore
from kvtier.stack import Stack
from kvtier.types import BlockKey, Namespace, block_key

logger = logging.getLogger(__name__)


class KVTierStorage(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages of SGLang's host memory in the tiers of a stack.

    Constructor and registration refuse an engine that cannot be served; no exception leaves another
    method. What fails is a miss.
    """

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        identity.check_version(HiCacheStorage)
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(
                "--hicache-storage-backend-extra-config",
                "without interface_v1 SGLang copies each page twice",
                'add "interface_v1": 1',
            )
        if "stack" not in extra:
            raise ConfigError(
                "--hicache-storage-backend-extra-config",
                "names no stack",
                'add "stack": the path of a stack\'s YAML file, or its content',
            )
        late = get_memory().hicache_storage_backend is None
        identity.watch_weights(WeightUpdater, attached_late=late)
        self._ranks = storage_config
        self._config = stack_config.load(extra["stack"])
        self._weights = extra.get("weights")
        self._store: PageStore | None = None

    # -- what SGLang has, and how it begins and ends ---------------------------------------------

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool is not self.mem_pool_host:
            raise ConfigError(
                "--model-path",
                f"SGLang keeps {host_pool_name} of this model beside its KV cache (states, windows "
                "or an index), and that was not tried",
                "serve it by an engine without kvtier",
            )

    def on_host_pools_registered(self) -> None:
        arguments, pool = get_server_args(), self.mem_pool_host
        model = ModelConfig.from_server_args(arguments)
        identity.refuse(arguments, model)
        pages = HostPages.of_pool(pool)
        facts = identity.facts_of(arguments, model, self._ranks, pool, self._weights)
        namespace = Namespace(facts=facts, group_bytes=pages.layout.group_bytes)
        stack = Stack.open(self._config, namespace, serving=True, engine=self._engine())
        try:
            self._store = PageStore(stack, pages)
        except BaseException:
            stack.close()
            raise
        logger.info("KV cache is kept, and found again: %s", stack.summary())

    def _engine(self) -> str:
        """The name of this rank's engine: private media have one owner."""
        ranks = self._ranks
        own = (
            ("dp", ranks.dp_rank, ranks.dp_rank + 1),
            ("tp", ranks.tp_rank, ranks.tp_size),
            ("pp", ranks.pp_rank, ranks.pp_size),
            ("cp", ranks.attn_cp_rank, ranks.attn_cp_size),
        )
        several = [f"-{name}{rank}" for name, rank, size in own if size > 1]
        return self._config.name + "".join(several)

    @guarded(lambda: None)
    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @guarded(lambda: None)
    def clear(self) -> None:
        if self._store is not None:
            self._store.clear()

    # -- pages -----------------------------------------------------------------------------------

    @property
    def _serving(self) -> PageStore | None:
        """Nothing is kept or found of other weights than those that the engine began with."""
        return None if identity.weights_changed.is_set() else self._store

    @guarded(lambda: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        store = self._serving
        return store.find(_block_keys(keys)) if store else 0

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        loaded = self._load(keys, host_indices)
        return [at < loaded for at in range(len(keys))]

    @guarded(lambda: 0)
    def _load(self, keys: list[str], host_indices: Any) -> int:
        store = self._serving
        return store.load(_block_keys(keys), self._numbers(host_indices)) if store else 0

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._keep(keys, host_indices) or [False] * len(keys)

    @guarded(list)
    def _keep(self, keys: list[str], host_indices: Any) -> list[bool]:
        store = self._serving
        return store.store(_block_keys(keys), self._numbers(host_indices)) if store else []

    def _numbers(self, host_indices: Any) -> list[int]:
        """SGLang names a page by its tokens' places, of which the first says all."""
        size = self.mem_pool_host.page_size
        return [int(place) // size for place in host_indices[::size].tolist()]

    # -- what SGLang calls only without `interface_v1` -------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return False


def _block_keys(keys: list[str]) -> list[BlockKey]:
    return [block_key(bytes.fromhex(key)) for key in keys]
