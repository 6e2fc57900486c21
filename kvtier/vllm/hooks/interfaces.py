"""The classes of vLLM that kvtier's own derive from, or speak in. The rest of kvtier takes them
from here, so that a version that has moved one is met in one place."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # 0.31 has none, and asks for none
    CacheHitSource = None

__all__ = [
    "CacheHitSource",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "RequestOffloadingContext",
    "TransferResult",
]
