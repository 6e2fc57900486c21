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
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_memory, get_server_args

from kvtier import config as stack_config
from kvtier.errors import ConfigError
from kvtier.guard import guarded
from kvtier.sglang import identity
from kvtier.sglang.pages import STATES_S, HostPages, PageKeys, PageStore, restorable
from kvtier.stack import Stack
from kvtier.types import Namespace

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
        self._others: dict[str, Any] = {}
        """SGLang's host pools beside that of the KV cache."""
        self._store: PageStore | None = None

    # -- what SGLang has, and how it begins and ends ---------------------------------------------

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool is self.mem_pool_host:
            return
        if self._store is not None:
            raise ConfigError(
                "--hicache-storage-backend",
                f"SGLang has added {host_pool_name} after it said which pools there are",
                "serve this model by an engine without kvtier",
            )
        self._others[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        arguments, pool = get_server_args(), self.mem_pool_host
        model = ModelConfig.from_server_args(arguments)
        identity.refuse(arguments, model)
        identity.refuse_pools(self._ranks, self._others)
        pages = HostPages.of_pools({PoolName.KV: pool, **self._others})
        facts = identity.facts_of(arguments, model, self._ranks, pool, self._weights)
        facts |= identity.facts_of_pools(arguments, self._others)
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

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    @guarded(PoolTransferResult.empty)
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The longest prefix of which all pools have what they need, and which others are so."""
        store = self._serving
        if store is None:
            return PoolTransferResult.empty()
        pages = store.pages
        transfers = pool_transfers or []
        hashes = [bytes.fromhex(key) for key in keys]
        (kv,) = store.find(pages.keys(PoolName.KV, hashes))
        count = kv.index(False) if False in kv else len(kv)
        if not count:
            return PoolTransferResult(0, {}, [])
        others = [pages.keys(each.name, hashes[:count]) for each in transfers]
        hits = {PoolName.KV: count}
        whole = list(range(1, count + 1))
        for transfer, there in zip(transfers, store.find(*others) if others else [], strict=True):
            if not whole:
                break
            if lengths := restorable(there, _needed(transfer, count)):
                hits[transfer.name] = lengths[-1]
            whole = sorted(set(whole).intersection(lengths))
        return PoolTransferResult(whole[-1] if whole else 0, hits, whole)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._load(PoolTransfer(PoolName.KV, host_indices, keys=keys))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        end = self._store.load_end(STATES_S) if self._store else 0.0
        return {each.name: self._load(each, end) for each in transfers}

    def _load(self, transfer: Any, end: float | None = None) -> list[bool]:
        loaded = self._loaded(transfer, end)
        return [at < loaded for at in range(len(transfer.keys or ()))]

    @guarded(lambda: 0)
    def _loaded(self, transfer: Any, end: float | None) -> int:
        store, pages = self._serving, self._pages_of(transfer)
        return store.load(*pages, end) if store and pages else 0

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._keep(PoolTransfer(PoolName.KV, host_indices, keys=keys))

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._keep(each) for each in transfers}

    def _keep(self, transfer: Any) -> list[bool]:
        return self._kept(transfer) or [False] * len(transfer.keys or ())

    @guarded(list)
    def _kept(self, transfer: Any) -> list[bool]:
        store, pages = self._serving, self._pages_of(transfer)
        return store.store(*pages) if store and pages else []

    def _pages_of(self, transfer: Any) -> tuple[list[PageKeys], list[int]] | None:
        """The keys and places of a transfer's pages; None if these do not belong together. SGLang
        names a page by its tokens' places, of which the first says all."""
        name, keys, indices = transfer.name, transfer.keys or [], transfer.host_indices
        size = (self.mem_pool_host if name == PoolName.KV else self._others[name]).page_size
        if self._store is None or indices is None or len(indices) != len(keys) * size:
            return None
        places = [int(place) for place in indices[::size].tolist()]
        if any(place % size for place in places):
            return None
        hashes = [bytes.fromhex(key) for key in keys]
        return self._store.pages.keys(name, hashes), [place // size for place in places]

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


def _needed(transfer: Any, count: int) -> int:
    """How many of a prefix's last pages a pool needs; raises ValueError if it says it otherwise."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return count
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return max(1, len(transfer.keys or ()))
    raise ValueError(f"SGLang asks by {transfer.hit_policy}, which kvtier does not know")
