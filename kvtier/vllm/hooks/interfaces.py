"""The classes of vLLM that kvtier's own derive from, or speak in. The rest of kvtier takes them
from here, so that a version that has moved one is met in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
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
    "LookupResult",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "RequestOffloadingContext",
    "TransferResult",
    "batched_copy",
]


def batched_copy() -> Callable[[Any, Any, Any, bool], None]:
    """vLLM's own copy of many pieces in one call: tensors of sources, targets and sizes."""
    from vllm import _custom_ops

    copy: Callable[[Any, Any, Any, bool], None] = _custom_ops.swap_blocks_batch
    return copy
