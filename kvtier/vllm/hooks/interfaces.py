"""The classes of vLLM that kvtier derives from, and the types and functions that it uses unchanged.

The rest of kvtier imports them from here, so that a version that has moved one is met in one place.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "CacheHitSource",
    "LookupResult",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "PrepareStoreOutput",
    "RequestOffloadingContext",
    "extra_keys",
    "maybe_convert_block_hash",
    "resolve_block_hashes",
]


def extra_keys(request: Any, start: int, end: int, block: int) -> Any:
    """What the hash of each block in this range covers beside its tokens, as events state it."""
    found, medium = [], 0
    for at in range(start, end, block):
        keys, medium = generate_block_hash_extra_keys(request, at, at + block, medium)
        found.append(keys)
    return to_event_extra_keys(found)
